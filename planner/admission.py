"""Whether one more request should be taken now, and what it can expect: a pure function."""

import enum
import math
from dataclasses import dataclass

from planner.errors import InvalidInputError
from planner.units import div_ceil

#: A full queue of a server whose speed is not known asks to come back after this long.
DEFAULT_RETRY_S = 1.0


class Refusal(enum.Enum):
    """Why a request is not taken. The first two hold for ever, the others for now."""

    CONTEXT = "context"  # longer than the model's context
    KV_CAPACITY = "kv_capacity"  # one sequence would not fit the pool
    QUEUE_FULL = "queue_full"
    TOO_SLOW = "too_slow"  # it would wait for longer than it may


@dataclass(frozen=True)
class ServerLoad:
    """What the engine holds now. Tokens are prompt and generated ones, the latter at their most.

    `unfinished_tokens` are those that running requests have still to compute. `tokens_per_s`
    (prompt and generated, measured or predicted), `kv_used_tokens` and `step_s` (the recent
    duration of a step) are None where not known.
    """

    kv_capacity_tokens: int
    block_tokens: int
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    unfinished_tokens: int
    max_waiting_requests: int
    max_context_tokens: int
    tokens_per_s: float | None = None
    kv_used_tokens: int | None = None
    step_s: float | None = None

    def __post_init__(self) -> None:
        for field, least in (("kv_capacity_tokens", 1), ("block_tokens", 1)):
            if getattr(self, field) < least:
                raise InvalidInputError(field, f"must be at least {least}")
        for field in ("waiting_requests", "waiting_tokens", "running_requests"):
            if getattr(self, field) < 0:
                raise InvalidInputError(field, "must be at least 0")
        for field in ("tokens_per_s", "step_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInputError(field, f"must be positive, is {value}")


@dataclass(frozen=True)
class Admission:
    """The answer. `refusal` is None for a request that is taken; `reason` says why not, in words.

    `retry_after_s` is None where retrying is of no use. Estimates are None where the server's
    speed is not known: `wait_s` until its first step, `total_s` until its last token, and the rate
    at which it will generate.
    """

    refusal: Refusal | None
    reason: str
    retry_after_s: float | None
    wait_s: float | None
    total_s: float | None
    generated_tokens_per_s: float | None

    @property
    def admitted(self) -> bool:
        return self.refusal is None


def admit(
    load: ServerLoad, prompt_tokens: int, max_tokens: int, *, max_wait_s: float = math.inf
) -> Admission:
    """Decide on a request of `prompt_tokens` that may generate `max_tokens`.

    It is taken unless it can never run, the queue is full, or it would wait for longer than
    `max_wait_s`. Raises InvalidInputError when a count is below 1.
    """
    for field, value in (("prompt_tokens", prompt_tokens), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidInputError(field, f"must be at least 1, is {value}")
    never = _never_fits(load, prompt_tokens, max_tokens)
    if never is not None:
        return Admission(*never, None, None, None, None)
    wait_s = _wait_s(load, prompt_tokens + max_tokens)
    rate = _generated_tokens_per_s(load)
    total_s = None if wait_s is None or rate is None else wait_s + max_tokens / rate
    refusal, reason, retry_after_s = _not_now(load, wait_s, max_wait_s)
    return Admission(refusal, reason, retry_after_s, wait_s, total_s, rate)


def _never_fits(
    load: ServerLoad, prompt_tokens: int, max_tokens: int
) -> tuple[Refusal, str] | None:
    asked = f"prompt_tokens {prompt_tokens} and max_tokens {max_tokens}"
    if prompt_tokens + max_tokens > load.max_context_tokens:
        limit = load.max_context_tokens
        return Refusal.CONTEXT, f"{asked} exceed the model's context of {limit} tokens"
    # The last token is sampled and never computed: it needs no KV.
    blocks = div_ceil(prompt_tokens + max_tokens - 1, load.block_tokens)
    if blocks * load.block_tokens > load.kv_capacity_tokens:
        needed, held = blocks * load.block_tokens, load.kv_capacity_tokens
        return Refusal.KV_CAPACITY, f"{asked} need {needed} tokens of KV; the pool holds {held}"
    return None


def _not_now(
    load: ServerLoad, wait_s: float | None, max_wait_s: float
) -> tuple[Refusal | None, str, float | None]:
    """(refusal, reason, retry_after_s); (None, "", None) for a request that is taken."""
    if load.waiting_requests >= load.max_waiting_requests:
        said = f"{load.waiting_requests} of {load.max_waiting_requests} requests wait"
        return Refusal.QUEUE_FULL, f"the queue is full: {said}", _queue_room_s(load)
    if wait_s is not None and wait_s > max_wait_s:
        reason = f"it would wait for {wait_s:.1f} s, longer than {max_wait_s:.1f} s"
        return Refusal.TOO_SLOW, reason, max(wait_s - max_wait_s, DEFAULT_RETRY_S)
    return None, "", None


def _wait_s(load: ServerLoad, own_tokens: int) -> float | None:
    """Tokens that must leave before it can start, over the server's rate.

    Once the KV is full, a request starts when as many tokens as it needs have left; those that
    wait come first. As long as all that is on hand fits the KV, nobody waits; where the use of the
    KV is not known, an empty queue is taken to mean that there is room.
    """
    if load.kv_used_tokens is None:
        short_tokens = load.waiting_tokens if load.waiting_requests else 0
    else:
        room = load.kv_capacity_tokens - load.kv_used_tokens - load.unfinished_tokens
        short_tokens = max(0, load.waiting_tokens + own_tokens - room)
    if short_tokens == 0:
        return 0.0
    return None if load.tokens_per_s is None else short_tokens / load.tokens_per_s


def _generated_tokens_per_s(load: ServerLoad) -> float | None:
    """One token a step; where a step's duration is not known, an equal share of the rate."""
    if load.step_s is not None:
        return 1 / load.step_s
    if load.tokens_per_s is None:
        return None
    return load.tokens_per_s / (load.running_requests + 1)


def _queue_room_s(load: ServerLoad) -> float:
    """Until so many of the waiting have started that there is a place in the queue."""
    if load.tokens_per_s is None or load.waiting_requests == 0:
        return DEFAULT_RETRY_S
    too_many = load.waiting_requests - load.max_waiting_requests + 1
    mean_tokens = load.waiting_tokens / load.waiting_requests
    return max(too_many * mean_tokens / load.tokens_per_s, DEFAULT_RETRY_S)
