"""The gRPC service: one session of plans, executed in order by one thread."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog
from moelens.v1 import gpu_worker_pb2
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerServicer

from gpu_worker import replies
from gpu_worker.engine import Engine
from gpu_worker.errors import PlanError, is_out_of_memory
from gpu_worker.profile import with_short_profile
from gpu_worker.runtime import LoadedModel
from gpu_worker.session import Session
from gpu_worker.weights import LoadProgress
from native.channel import ChannelError, DevicePort
from protos.errors import Aborted, InvalidArgument, ResourceExhausted, ServiceError, Unavailable

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Plans: TypeAlias = AsyncIterator[gpu_worker_pb2.ExecuteRequest]

log = structlog.get_logger("gpu_worker")

RETRY_AFTER_S = 1.0


@dataclass
class Epoch:
    """One life of the channel: from a Configure of the CPU worker to its death or ours."""

    number: int
    port: DevicePort
    engine: Engine


class _Stream:
    """A session and what is under way for it."""

    def __init__(self, epoch: Epoch, session: Session) -> None:
        self.epoch = epoch
        self.session = session
        # What the caller is told once the session is over; plans that have not begun then do not.
        self.ended: Exception | None = None
        self.last_step_end_s: float | None = None
        self.results: asyncio.Queue[Future[gpu_worker_pb2.StepResult] | None] = asyncio.Queue()

    def end(self, reason: Exception) -> None:
        """Called on the event loop."""
        if self.ended is None:
            self.ended = reason
            future: Future[gpu_worker_pb2.StepResult] = Future()
            future.set_exception(reason)
            self.results.put_nowait(future)


class GpuWorkerService(GpuWorkerServicer):
    """See gpu_worker.proto. `run` is the background that loads the model and keeps an epoch."""

    def __init__(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._model: LoadedModel | None = None
        self._epoch: Epoch | None = None
        self._stream: _Stream | None = None
        # Engine, port and session belong to this thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        # Set when a session ended because the CPU worker is lost.
        self.epoch_lost = asyncio.Event()
        self._step_due_s = math.inf  # when the step that runs has to be done

    # -- what the background does ---------------------------------------------------------------

    def set_model(self, model: LoadedModel) -> None:
        """The weights are there."""
        self._model = model

    async def open_epoch(self, number: int, segment_path: str) -> None:
        """Serve over a new segment. Raises ChannelError or OSError where it cannot be opened."""
        assert self._model is not None
        self.epoch_lost.clear()
        self._epoch = await self._on_engine_thread(self._open_epoch, number, segment_path)

    def end_session(self, reason: Exception) -> None:
        """Tell its caller why; the step that runs is finished."""
        if self._stream is not None:
            self._stream.end(reason)

    async def close_epoch(self, reason: Exception) -> None:
        """End the session, and leave the segment."""
        epoch, self._epoch = self._epoch, None
        self.end_session(reason)
        if epoch is not None:
            epoch.port.cancel()
            await self._on_engine_thread(epoch.port.close)

    async def close_model(self) -> None:
        """Stop what runs beside the engine."""
        model, self._model = self._model, None
        if model is not None:
            await self._on_engine_thread(model.close)

    @property
    def hangs(self) -> bool:
        """Whether the step that runs takes longer than its plan allows."""
        return time.monotonic() > self._step_due_s

    async def check_peers(self) -> None:
        """Notice a death while no step runs. Raises ChannelError."""
        epoch = self._epoch
        if epoch is not None:
            await self._on_engine_thread(epoch.port.check_peers)

    async def _on_engine_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _open_epoch(self, number: int, segment_path: str) -> Epoch:
        assert self._model is not None
        port = DevicePort(segment_path, peer_timeout_s=self._model.worker.peer_timeout_s)
        worker = self._model.worker
        if worker.measure and not worker.checksums and not self._model.is_profiled:
            self._model = with_short_profile(self._model, port)
        return Epoch(number, port, self._model.engine(port))

    # -- RPCs -----------------------------------------------------------------------------------

    async def GetInfo(
        self, request: gpu_worker_pb2.GetInfoRequest, context: Context
    ) -> gpu_worker_pb2.GetInfoResponse:
        model, epoch = self._require()
        return replies.info(model, epoch.number)

    async def Execute(
        self, requests: Plans, context: Context
    ) -> AsyncIterator[gpu_worker_pb2.ExecuteResponse]:
        stream = self._begin_stream()
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            while (step := await stream.results.get()) is not None:
                result = await asyncio.wrap_future(step)
                yield gpu_worker_pb2.ExecuteResponse(result=result)
        except Unavailable:
            self.epoch_lost.set()
            raise
        finally:
            reader.cancel()
            stream.end(Aborted("the session's stream has ended"))
            if self._stream is stream:
                self._stream = None

    def _require(self) -> tuple[LoadedModel, Epoch]:
        """Model and epoch; Unavailable while either is missing."""
        if self._model is None:
            raise Unavailable(
                "the model is still loading",
                reason="LOADING",
                retry_after_s=RETRY_AFTER_S,
                details=[replies.load_progress(self._progress)],
            )
        if self._epoch is None:
            raise Unavailable(
                "the CPU worker is not ready", reason="NO_CPU_WORKER", retry_after_s=RETRY_AFTER_S
            )
        return self._model, self._epoch

    def _begin_stream(self) -> _Stream:
        model, epoch = self._require()
        if self._stream is not None:
            self._stream.end(Aborted("a new session has begun"))
        self._stream = _Stream(epoch, Session(model.limits, epoch.port.set_blocks))
        return self._stream

    async def _read(self, requests: Plans, stream: _Stream) -> None:
        """Hand plans to the engine's thread as they come, so that none waits for this loop."""
        try:
            async for request in requests:
                step = self._thread.submit(self._step, stream, request.plan)
                stream.results.put_nowait(step)
        finally:
            stream.results.put_nowait(None)

    # -- the engine's thread ----------------------------------------------------------------------

    def _step(self, stream: _Stream, plan: gpu_worker_pb2.StepPlan) -> gpu_worker_pb2.StepResult:
        if stream.ended is not None:
            raise stream.ended
        begin_s = time.perf_counter()
        self._step_due_s = time.monotonic() + plan.timeout_s if plan.timeout_s > 0 else math.inf
        try:
            output = stream.epoch.engine.run(stream.session.apply(plan))
        except Exception as error:
            stream.ended = _what_the_caller_is_told(error)
            raise stream.ended from error
        finally:
            self._step_due_s = math.inf
        if stream.last_step_end_s is not None:
            output.times.wait_for_plan_s = max(0.0, begin_s - stream.last_step_end_s)
        stream.last_step_end_s = time.perf_counter()
        return replies.step_result(output)


def _what_the_caller_is_told(error: Exception) -> Exception:
    """The status of a step that failed."""
    if isinstance(error, PlanError):
        return InvalidArgument(error.message, field=error.field)
    if isinstance(error, ChannelError):
        return Unavailable(
            f"the CPU worker is lost: {error}",
            reason="CPU_WORKER_LOST",
            retry_after_s=RETRY_AFTER_S,
        )
    text = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return ResourceExhausted(text, reason="OUT_OF_MEMORY")
    log.exception("step failed", exc_info=error)
    return ServiceError(text, reason="STEP_FAILED")
