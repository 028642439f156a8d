"""Whether a request may join the queue, and when to come back if not.

The planner may be away: then its last plan stays in force, and the queue's own bound holds.
"""

from dataclasses import dataclass

from gateway.validation import CheckedRequest
from protos.errors import ResourceExhausted

# Before anything is known of the speed, a full queue asks to come back after this long.
DEFAULT_RETRY_S = 1.0


@dataclass(frozen=True)
class Load:
    """What the engine has on its hands."""

    running: int
    waiting: int
    outstanding_tokens: int  # prompt and generated tokens still to compute, running and waiting
    tokens_per_s: float  # over the last seconds of work, 0 when there was none


@dataclass(frozen=True)
class Plan:
    """The planner's last word; None: it has not said."""

    tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    prompts_per_step: float | None = None
    limit: str = ""


class Admission:
    """Guards the queue."""

    def __init__(self, max_waiting_requests: int) -> None:
        self._max_waiting_requests = max_waiting_requests
        self.plan = Plan()

    async def admit(self, request: CheckedRequest, load: Load) -> None:
        """Return when it may join the queue; ResourceExhausted with a time to retry otherwise."""
        if load.waiting + request.outputs > self._max_waiting_requests:
            raise ResourceExhausted(
                f"the queue is full: {load.waiting} requests wait",
                reason="QUEUE_FULL",
                retry_after_s=max(self.wait_s(load), DEFAULT_RETRY_S),
            )

    def wait_s(self, load: Load) -> float:
        """How long what is outstanding takes at the present speed, or the predicted one."""
        speed = load.tokens_per_s or self.plan.tokens_per_s or 0.0
        return load.outstanding_tokens / speed if speed and load.waiting else 0.0
