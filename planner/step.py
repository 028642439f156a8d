"""What the scheduler is told and what it returns: limits, and the plan of one step."""

import itertools
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.errors import InvalidInputError
from planner.request import BlockId, Sequence, SequenceId


class SchedulerError(ValueError):
    """The caller asked for what cannot be: a duplicate id, a sequence that never fits, …"""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    max_step_tokens: n_real, tokens of one step; running sequences never exceed it either.
    max_running_sequences: sequences that hold KV; None: as many as the KV and a step hold.
    prefill_chunk_tokens: prompt tokens of one sequence in one step; None: what the step holds.
    prompts_per_step: q*, prompts started per step on average; None: unpaced.
    """

    max_step_tokens: int
    max_running_sequences: int | None = None
    prefill_chunk_tokens: int | None = None
    prompts_per_step: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running_sequences", "prefill_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(name, f"must be at least 1, is {value}")
        if self.prompts_per_step is not None and not 0 < self.prompts_per_step < math.inf:
            raise InvalidInputError(
                "prompts_per_step", f"must be a positive number, is {self.prompts_per_step}"
            )

    @property
    def running_limit(self) -> int:
        """Sequences that may hold KV, such that all of them can decode in one step."""
        return min(self.max_running_sequences or self.max_step_tokens, self.max_step_tokens)


class Chunk(NamedTuple):
    """Tokens [start_position, start_position + token_count) of one sequence, in one step."""

    sequence: Sequence
    start_position: int
    token_count: int
    new_blocks: SequenceOf[BlockId]  # appended to the sequence's block table by this step
    samples: bool  # a token is sampled after the chunk's last one
    starts: bool  # first chunk after admission: the worker knows nothing of the sequence yet


@dataclass(frozen=True, slots=True)
class Step:
    """One pass over the model. The worker drops `released` first, then computes `chunks`."""

    step_id: int
    chunks: list[Chunk]  # decodes first: chunks[:decode_count]
    decode_count: int
    released: list[SequenceId]  # finished, cancelled or preempted since the step before
    preempted: list[SequenceId]  # those of them that will start again
    epoch: int = field(repr=False)  # restarts before it was made

    @property
    def token_count(self) -> int:
        prefills = itertools.islice(self.chunks, self.decode_count, None)
        return self.decode_count + sum(chunk.token_count for chunk in prefills)
