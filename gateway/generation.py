"""One sequence that is being generated: everything that must survive a worker's death.

The engine writes, one consumer (the call that asked for it) reads. The tokens that wait for a slow
consumer are bounded by max_tokens, and no KV is held for them; protos.calls ends the call of one
that does not read at all.
"""

import asyncio
import enum
import time
from dataclasses import dataclass, field

from moelens.v1.common_pb2 import SamplingParams, TokenLogprobs

from planner.request import Sequence, SequenceId
from protos.errors import ServiceError


class Outcome(enum.Enum):
    """Why a sequence ended without an error."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Work:
    """What to generate. `sampling` has its seed and, as stop_token_ids, every id that ends it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    client: str = ""  # between clients shares are fair
    deadline_s: float | None = None  # by time.monotonic(); None: the caller waits


@dataclass
class News:
    """What came since the consumer last looked."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    outcome: Outcome | None = None


class Generation:
    """The state of one sequence. `inbox` is set whenever there is something to `collect`;
    sequences of one request share it."""

    def __init__(
        self, work: Work, sequence_id: SequenceId, arrival: int, inbox: asyncio.Event
    ) -> None:
        self.work = work
        self.inbox = inbox
        self.preemptions = 0
        self.generated_ids: list[int] = []
        self.sequence = Sequence(
            sequence_id,
            len(work.prompt_ids),
            work.max_tokens,
            priority=work.priority,
            arrival=arrival,
        )
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None  # when a step that works on it was planned first
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._stop_ids = frozenset(work.sampling.stop_token_ids)
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._news = News()
        self._error: ServiceError | None = None

    @property
    def sequence_id(self) -> SequenceId:
        """The engine's id of it."""
        return self.sequence.sequence_id

    @property
    def known_ids(self) -> list[int]:
        """Prompt and generated tokens: what a worker has to know to go on."""
        return [*self.work.prompt_ids, *self.generated_ids]

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to compute, by a generous count."""
        prompt = 0 if self.generated_ids else len(self.work.prompt_ids)
        return prompt + self.work.max_tokens - len(self.generated_ids)

    def renew_sequence(self) -> None:
        """Counts for a scheduler that has never seen it: nothing computed, tokens kept."""
        old = self.sequence
        self.sequence = Sequence(
            old.sequence_id,
            old.prompt_tokens,
            old.max_tokens,
            priority=old.priority,
            arrival=old.arrival,
            generated_tokens=len(self.generated_ids),
        )

    def take(self, token_id: int, logprobs: TokenLogprobs | None, now: float) -> bool:
        """Append a sampled token; return whether it ends the sequence before max_tokens."""
        if self.first_token_at is None:
            self.first_token_at = now
            if self.work.sampling.HasField("prompt_logprobs"):
                positions = range(1, len(self.work.prompt_ids))
                found = self._prompt_logprobs
                self._news.prompt_logprobs = [found[p] for p in positions if p in found]
        self.last_token_at = now
        self.generated_ids.append(token_id)
        self._news.token_ids.append(token_id)
        if logprobs is not None:
            self._news.logprobs.append(logprobs)
        self.inbox.set()
        return token_id in self._stop_ids and (
            len(self.generated_ids) >= self.work.sampling.min_tokens
        )

    def take_prompt_logprobs(self, start_position: int, entries: list[TokenLogprobs]) -> None:
        """Keep those of one prompt chunk; a chunk computed again brings the same ones."""
        for offset, entry in enumerate(entries):
            self._prompt_logprobs[start_position + offset] = entry

    def finish(self, outcome: Outcome) -> None:
        """The last token is there."""
        self._news.outcome = outcome
        self.inbox.set()

    def fail(self, error: ServiceError) -> None:
        """End it with an error, after the tokens that came before."""
        self._error = error
        self.inbox.set()

    def collect(self) -> News:
        """What came since the last time; raises the error that ended the sequence, once the
        tokens before it have been collected."""
        news, self._news = self._news, News()
        if self._error is not None and not news.token_ids:
            raise self._error
        if self._error is not None:
            self.inbox.set()  # the error comes next
        return news
