"""Whether a request may join the queue, and when to come back if not: the planner decides.

The planner may be away or slow. Then its last plan stays in force: the queue's own bound and the
last predicted speed decide, and it is asked again a little later.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import structlog
from moelens.v1 import planner_pb2 as messages
from moelens.v1.planner_pb2_grpc import PlannerStub

from gateway.validation import CheckedRequest
from gateway.worker import WorkerInfo
from protos.errors import ResourceExhausted

log = structlog.get_logger("admission")

ADMIT_TIMEOUT_S = 1.0
# After a failure the planner is left alone for so long, or every request would wait for it.
PAUSE_S = 2.0
# Before anything is known of the speed, a full queue asks to come back after this long.
DEFAULT_RETRY_S = 1.0


@dataclass(frozen=True)
class Load:
    """What the engine has on its hands."""

    running: int
    waiting: int
    waiting_tokens: int  # prompt and most generated tokens of requests that never ran
    unfinished_tokens: int  # the same of those that have run, less what is done
    tokens_per_s: float  # over the last seconds of work, 0 when there was none

    @property
    def outstanding_tokens(self) -> int:
        """All tokens still to compute."""
        return self.waiting_tokens + self.unfinished_tokens


@dataclass(frozen=True)
class Plan:
    """The planner's last prediction; None: it has not made one."""

    tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    limit: str = ""


class Admission:
    """Guards the queue. `plan` is what the planner last said, `info` what the worker can hold."""

    def __init__(self, planner: PlannerStub, max_waiting_requests: int) -> None:
        self.plan = Plan()
        self.info: WorkerInfo | None = None
        self._planner = planner
        self._max_waiting_requests = max_waiting_requests
        self._ask_again_at = 0.0

    async def admit(
        self, request: CheckedRequest, load: Load, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Return when it may join the queue; ResourceExhausted with a time to retry otherwise.
        `metadata` goes with the question to the planner."""
        answer = await self._ask(request, load, metadata)
        if answer is not None and not answer.admitted:
            retry = answer.retry_after_s if answer.HasField("retry_after_s") else None
            raise ResourceExhausted(answer.reason, reason="NOT_ADMITTED", retry_after_s=retry)

    def check_room(self, request: CheckedRequest, load: Load) -> None:
        """The bound that holds without the planner, and for those who asked it at once."""
        if load.waiting + request.outputs > self._max_waiting_requests:
            raise ResourceExhausted(
                f"the queue is full: {load.waiting} of {self._max_waiting_requests} requests wait",
                reason="QUEUE_FULL",
                retry_after_s=max(self.wait_s(load), DEFAULT_RETRY_S),
            )

    def wait_s(self, load: Load) -> float:
        """How long what is outstanding takes at the present speed, or the predicted one."""
        speed = self._speed(load)
        return load.outstanding_tokens / speed if speed and load.waiting else 0.0

    def _speed(self, load: Load) -> float:
        return load.tokens_per_s or self.plan.tokens_per_s or 0.0

    async def _ask(
        self, request: CheckedRequest, load: Load, metadata: Sequence[tuple[str, str]]
    ) -> messages.AdmitResponse | None:
        """The planner's answer, None when there is none."""
        if self.info is None or time.monotonic() < self._ask_again_at:
            return None
        question = messages.AdmitRequest(
            prompt_tokens=len(request.prompt_ids),
            max_tokens=request.max_tokens,
            kv_capacity_tokens=self.info.kv_capacity_tokens,
            block_tokens=self.info.block_tokens,
            waiting_requests=load.waiting + request.outputs - 1,
            running_requests=load.running,
            waiting_tokens=load.waiting_tokens,
            unfinished_tokens=load.unfinished_tokens,
            max_waiting_requests=self._max_waiting_requests,
            tokens_per_s=self._speed(load),
            max_context_tokens=self.info.context_tokens,
        )
        try:
            answer: messages.AdmitResponse = await self._planner.Admit(
                question, timeout=ADMIT_TIMEOUT_S, metadata=tuple(metadata)
            )
        except grpc.aio.AioRpcError as error:
            log.warning("no planner; its last plan stays in force", code=error.code().name)
            self._ask_again_at = time.monotonic() + PAUSE_S
            return None
        return answer
