"""What the scheduler knows of a request: counts, never token ids.

    0              prompt_tokens        known_tokens        target_tokens
    |--- prompt ---|--- generated (confirmed) ---|--- sampled, result not read yet ---|
    |--------------- computed_tokens (KV written or being written) ---|

All ranges are half-open. The caller owns prompt_tokens, max_tokens, priority and arrival; the
scheduler alone changes the rest.
"""

import enum
from typing import NewType

from planner.errors import InvalidInputError

SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)


class SequenceState(enum.Enum):
    """Where a sequence stands. Only PREFILLING and DECODING hold KV blocks.

    WAITING → PREFILLING → DECODING → FINISHING → FINISHED; preemption and restart lead back to
    WAITING, and FINISHED can be reached from everywhere (cancelled, or stopped by the caller).
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHING = "finishing"  # its last token is on its way; it needs its KV no longer
    FINISHED = "finished"


class Sequence:
    """One request's progress through the scheduler.

    A higher `priority` is served first; among equals the lower `arrival` is. `generated_tokens`
    above zero resumes a request whose first tokens were made elsewhere.

    Raises InvalidInputError naming the field when a count makes no sense.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "computed_tokens",
        "generated_tokens",
        "max_tokens",
        "num_starts",
        "priority",
        "prompt_tokens",
        "sampled_tokens",
        "sequence_id",
        "state",
    )

    def __init__(
        self,
        sequence_id: SequenceId,
        prompt_tokens: int,
        max_tokens: int,
        *,
        priority: int = 0,
        arrival: int = 0,
        generated_tokens: int = 0,
    ) -> None:
        if prompt_tokens < 1:
            raise InvalidInputError("prompt_tokens", f"must be at least 1, is {prompt_tokens}")
        if max_tokens < 1:
            raise InvalidInputError("max_tokens", f"must be at least 1, is {max_tokens}")
        if not 0 <= generated_tokens < max_tokens:
            raise InvalidInputError(
                "generated_tokens",
                f"must be at least 0 and below max_tokens {max_tokens}, is {generated_tokens}",
            )
        self.sequence_id = sequence_id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival = arrival
        self.generated_tokens = generated_tokens  # confirmed by apply()
        self.sampled_tokens = generated_tokens  # confirmed or being sampled by a step in flight
        self.computed_tokens = 0
        self.blocks: list[BlockId] = []
        self.num_starts = 0  # admissions, the ones after a preemption or a restart included
        self.state = SequenceState.WAITING

    @property
    def known_tokens(self) -> int:
        """Tokens whose ids are known to the caller: the prompt and the confirmed ones."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def target_tokens(self) -> int:
        """Tokens that exist once every step in flight has run."""
        return self.prompt_tokens + self.sampled_tokens

    @property
    def unconfirmed_tokens(self) -> int:
        """Tokens that steps in flight sample and whose result has not been applied."""
        return self.sampled_tokens - self.generated_tokens

    @property
    def max_kv_tokens(self) -> int:
        """The most KV that it ever holds: the last token is sampled but never computed."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of both queues: the first is served first and preempted last."""
        return (-self.priority, self.arrival, self.sequence_id)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.state.value}, prompt={self.prompt_tokens},"
            f" generated={self.generated_tokens}/{self.max_tokens},"
            f" computed={self.computed_tokens}, blocks={len(self.blocks)})"
        )
