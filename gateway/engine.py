"""The engine: owns every request, drives the scheduler, keeps the GPU worker busy.

Requests live here and nowhere else. A session with the GPU worker starts from nothing; when it
ends, whatever the cause, the scheduler queues everything again with the tokens known so far, and
the next session computes their KV anew. A client notices a pause. Where a step itself fails, the
request that makes it fail is looked for (gateway.culprit) and ends with an error of its own.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable

import grpc
import structlog
from moelens.v1 import gpu_worker_pb2 as messages
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub

from gateway import failures
from gateway.admission import Load
from gateway.failures import Cause, SessionEnded
from gateway.generation import Generation, Outcome, Work
from gateway.metrics import Metrics
from gateway.pacing import EngineConfig, paced, scheduler_limits
from gateway.patience import Patience
from gateway.plans import step_plan
from gateway.step_log import StepOutcome
from gateway.step_size import StepSize
from gateway.trials import Trials
from gateway.turns import Turns
from gateway.worker import WorkerInfo, wait_for_worker
from planner.blocks import BlockPool, IntegrityError
from planner.request import SequenceId
from planner.scheduler import Scheduler, SchedulerError, Step
from protos.errors import DataLoss, InvalidArgument, ServiceError, Unavailable

log = structlog.get_logger("engine")

# Losses of the worker in a row, without a result in between, before a request is suspected.
LOSSES_BEFORE_SEARCH = 2


class Engine:
    """Generates for all requests of one model.

    `run()` is the one task that talks to the worker; `submit()` and `cancel()` are called from the
    same event loop, between its awaits.
    """

    def __init__(
        self,
        worker: GpuWorkerStub,
        config: EngineConfig,
        metrics: Metrics,
        adopt: Callable[[WorkerInfo], None] = lambda info: None,
    ) -> None:
        """`adopt` is told of every worker before it gets work; it may refuse one (ValueError)."""
        self.info: WorkerInfo | None = None
        self.recoveries = 0
        # Mean prompt and generated tokens of a request; None: not known yet.
        self.expected_lengths: tuple[float, float] | None = None
        self.broken = ""  # why nothing can be generated just now
        self._worker = worker
        self._config = config
        self._metrics = metrics
        self._adopt_elsewhere = adopt
        self._scheduler: Scheduler | None = None
        self._generations: dict[SequenceId, Generation] = {}
        self._in_flight: deque[Step] = deque()
        self._outstanding_tokens = 0
        self._unstarted_tokens = 0  # the part of them that no step has worked on
        self._sequence_ids = itertools.count(1)
        self._turns = Turns()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failures = 0
        self._last_result_at = 0.0
        self._planned: dict[int, tuple[float, float]] = {}  # when, and how long it took
        self.observe: Callable[[StepOutcome], None] | None = None
        self.patience = Patience(
            min(config.least_step_timeout_s, config.step_timeout_s), config.step_timeout_s
        )
        self._last_failure = ""
        self._culprits = 0  # found in a row, without a result in between
        self._trials = Trials()  # of requests that may make steps fail
        self._step_size = StepSize()

    @property
    def scheduler(self) -> Scheduler:
        """Raises Unavailable before the worker was there for the first time."""
        if self._scheduler is None:
            raise Unavailable("the model is still loading", reason="LOADING", retry_after_s=1.0)
        return self._scheduler

    def current_scheduler(self) -> Scheduler | None:
        """None before the worker was there for the first time."""
        return self._scheduler

    @property
    def _worker_timeout_s(self) -> float | None:
        """No bound before the first worker came: a large model loads for as long as it takes."""
        return None if self.info is None else self._config.worker_timeout_s

    def submit(self, work: Work, inbox: asyncio.Event) -> Generation:
        """Queue a sequence. Unavailable when out of order, InvalidArgument when it cannot fit."""
        if self.broken:
            raise Unavailable(self.broken, reason="OUT_OF_ORDER", retry_after_s=5.0)
        sequence_id = SequenceId(next(self._sequence_ids))
        tokens = len(work.prompt_ids) + work.max_tokens
        place = self._turns.place(work.client, tokens, work.deadline_s)
        generation = Generation(work, sequence_id, place, inbox)
        try:
            self.scheduler.add(generation.sequence)
        except SchedulerError as error:
            raise InvalidArgument(str(error), field="max_tokens") from error
        self._generations[generation.sequence_id] = generation
        if self._trials.under_way:
            self._trials.hold(generation, self.scheduler)
        self._outstanding_tokens += generation.outstanding_tokens
        self._unstarted_tokens += generation.outstanding_tokens
        self._idle.clear()
        self._changed.set()
        return generation

    def load(self) -> Load:
        """What is on the engine's hands."""
        scheduler = self.scheduler
        tokens_per_s, _ = self._metrics.throughput.rates(time.monotonic())
        return Load(
            scheduler.running,
            scheduler.waiting,
            self._unstarted_tokens,
            self._outstanding_tokens - self._unstarted_tokens,
            tokens_per_s,
        )

    def requests_on_hand(self) -> int:
        """Sequences running and waiting."""
        return len(self._generations)

    def cancel(self, generation: Generation) -> None:
        """Stop working on it and free its KV; nothing happens when it has ended."""
        if self._forget(generation.sequence_id) is not None:
            self.scheduler.cancel(generation.sequence_id)
            self._judge()  # it may have been the last on trial: nobody else would be let in again
            self._changed.set()

    def fail_all(self, error: ServiceError) -> None:
        """End every request with this error."""
        for generation in list(self._generations.values()):
            self.cancel(generation)
            generation.fail(error)

    def check_integrity(self) -> None:
        """Raise planner.blocks.IntegrityError unless every KV block is where it should be."""
        if self._scheduler is not None:
            self._scheduler.check_integrity()
            if not self._generations and self._scheduler.pool.used_blocks:
                raise IntegrityError("KV blocks are in use and no request is")

    async def until_idle(self) -> None:
        """Return when no request is left."""
        await self._idle.wait()

    async def run(self, ready: Callable[[bool], Awaitable[None]]) -> None:
        """Connect to the worker and serve, for ever. `ready` is told when that starts and stops."""
        while True:
            try:
                self._adopt(await wait_for_worker(self._worker, self._worker_timeout_s))
                await self._session(ready)
            except TimeoutError as error:
                await self._break(str(error), ready)
            except (grpc.aio.AioRpcError, SessionEnded) as error:
                await self._recover(error, ready)

    def _adopt(self, info: WorkerInfo) -> None:
        """Build pool and scheduler for this worker, or keep them if it is like the last one."""
        self._adopt_elsewhere(info)
        if self.info is not None and info.geometry == self.info.geometry:
            return
        limits = scheduler_limits(info, self._config)
        self.info = info
        self._scheduler = Scheduler(BlockPool(info.kv_blocks, info.block_tokens), limits)
        self._trials.end()
        for generation in list(self._generations.values()):
            self._readmit(generation)
        log.info("worker ready", model=info.model_name, kv_blocks=info.kv_blocks, limits=limits)

    def _readmit(self, generation: Generation) -> None:
        """Queue it with a scheduler that does not know it yet."""
        generation.renew_sequence()
        try:
            self.scheduler.add(generation.sequence)
        except SchedulerError as error:
            self._forget(generation.sequence_id)
            generation.fail(Unavailable(f"the new worker's KV cache is too small: {error}"))

    async def _session(self, ready: Callable[[bool], Awaitable[None]]) -> None:
        """One session; raises when it ends."""
        call = self._worker.Execute()
        self._last_result_at = time.monotonic()
        sender = asyncio.create_task(self._send(call))
        watchdog = asyncio.create_task(self._watch())
        receiver = asyncio.create_task(self._receive(call))
        tasks = {sender, watchdog, receiver}
        try:
            self.broken = ""
            await ready(True)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The receiver's error has the status and the reason in it.
            for task in sorted(done, key=lambda task: task is not receiver):
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.wait(tasks)

    async def _send(self, call: "grpc.aio.StreamStreamCall") -> None:  # type: ignore[type-arg]
        """Plan and send steps as long as fewer than `plan_ahead_steps` are under way."""
        while True:
            self._changed.clear()
            while len(self._in_flight) < self._config.plan_ahead_steps:
                begin_s = time.monotonic()
                self._pace()
                step = self.scheduler.schedule()
                if step is None:
                    break
                if not self._in_flight:
                    self._last_result_at = time.monotonic()
                self._in_flight.append(step)
                self._note_starts(step)
                plan = step_plan(step, self._generations, self.patience.worker_step_s)
                try:
                    await call.write(messages.ExecuteRequest(plan=plan))
                except asyncio.InvalidStateError as error:  # grpc: the call has ended
                    raise SessionEnded("the GPU worker closed the session") from error
                if self.observe is not None:
                    self._planned[step.step_id] = (begin_s, time.monotonic() - begin_s)
            await self._changed.wait()

    def _pace(self) -> None:
        """Start prompts at q* while there are more than a steady state holds."""
        if self.expected_lengths is not None:
            requests = len(self._generations)
            self.scheduler.limits = paced(self.scheduler.limits, *self.expected_lengths, requests)

    def _note_starts(self, step: Step) -> None:
        now = time.monotonic()
        for sequence_id in step.preempted:
            if sequence_id in self._generations:
                self._generations[sequence_id].preemptions += 1
        for chunk in step.chunks:
            generation = self._generations[chunk.sequence.sequence_id] if chunk.starts else None
            if generation is not None and generation.started_at is None:
                self._unstarted_tokens -= generation.outstanding_tokens
                generation.started_at = now
                self._turns.served(generation.sequence.arrival)

    async def _receive(self, call: "grpc.aio.StreamStreamCall") -> None:  # type: ignore[type-arg]
        async for response in call:
            self._apply(response.result)
            self._failures = self._culprits = 0
            self._judge()
            self._step_size.note_success(self.scheduler)
            self._changed.set()
        raise SessionEnded("the GPU worker closed the session")

    async def _watch(self) -> None:
        """A worker that owes a result and says nothing counts as dead."""
        while True:
            await asyncio.sleep(self.patience.step_s / 10)
            silent_s = time.monotonic() - self._last_result_at
            if self._in_flight and silent_s > self.patience.step_s:
                raise SessionEnded(f"no result of a step for {silent_s:.1f} s")

    def _apply(self, result: messages.StepResult) -> None:
        """Give each sampled token to its owner, end what has ended."""
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            raise SessionEnded(f"an unexpected result, of step {result.step_id}")
        step = self._in_flight.popleft()
        now = time.monotonic()
        wall_s, self._last_result_at = now - self._last_result_at, now
        self.patience.note(wall_s)
        for failed in result.errors:
            error = DataLoss(failed.message, reason="SEQUENCE_FAILED")
            self._fail(SequenceId(failed.sequence_id), error)
        stopped = self._take_tokens(step, result, now)
        for sequence in self.scheduler.apply(step, stopped):
            generation = self._forget(sequence.sequence_id)
            if generation is not None:
                stop = sequence.sequence_id in stopped
                outcome = Outcome.STOP if stop else Outcome.LENGTH
                self._metrics.finished(generation, outcome.value, now)
                generation.finish(outcome)
        self._metrics.step_done(step, result.times, wall_s, self.scheduler)
        log.debug("step", step_id=step.step_id, tokens=step.token_count, wall_s=wall_s)
        if self.observe is not None:
            planned_at_s, plan_s = self._planned.pop(step.step_id, (now, 0.0))
            apply_s = time.monotonic() - now
            self.observe(
                StepOutcome(step, result.times, planned_at_s, now, wall_s, plan_s, apply_s)
            )

    def _take_tokens(self, step: Step, result: messages.StepResult, now: float) -> set[SequenceId]:
        """Returns the sequences that their token ends."""
        logprobs = {entry.sequence_id: entry for entry in result.logprobs}
        for sequence_id, entry in logprobs.items():
            owner = self._generations.get(SequenceId(sequence_id))
            if owner is not None and entry.prompt:
                owner.take_prompt_logprobs(entry.prompt_start_position, list(entry.prompt))
        sampled = dict(zip(result.sequence_ids, result.token_ids, strict=True))
        stopped = set()
        for chunk in step.chunks:
            sequence_id = chunk.sequence.sequence_id
            generation = self._generations.get(sequence_id)
            if not chunk.samples or generation is None or generation.sequence is not chunk.sequence:
                continue  # it ended, or was held back, while the step was under way
            if sequence_id not in sampled:
                raise SessionEnded(f"the result of step {step.step_id} lacks a token")
            own = logprobs.get(sequence_id)
            token_logprobs = own.token if own is not None and own.HasField("token") else None
            self._metrics.token(generation, now)
            self._outstanding_tokens -= generation.outstanding_tokens
            if generation.take(sampled[sequence_id], token_logprobs, now):
                stopped.add(sequence_id)
            self._outstanding_tokens += generation.outstanding_tokens
            self._trials.acquit(sequence_id)
        return stopped

    def _fail(self, sequence_id: SequenceId, error: ServiceError) -> None:
        generation = self._forget(sequence_id)
        if generation is not None:
            self.scheduler.cancel(sequence_id)
            generation.fail(error)

    def _forget(self, sequence_id: SequenceId) -> Generation | None:
        generation = self._generations.pop(sequence_id, None)
        self._trials.leave(sequence_id)
        if generation is not None:
            self._outstanding_tokens -= generation.outstanding_tokens
            if generation.started_at is None:
                self._unstarted_tokens -= generation.outstanding_tokens
        if not self._generations:
            self._idle.set()
        return generation

    async def _recover(self, error: Exception, ready: Callable[[bool], Awaitable[None]]) -> None:
        """All KV is lost: queue everything again; give up for now after repeated failures."""
        self.recoveries += 1
        self._metrics.recoveries.inc()
        self._failures += 1
        failed = self._in_flight[0] if self._in_flight else None
        self._in_flight.clear()
        self._planned.clear()
        interrupted = self.scheduler.restart()
        cause = failures.cause_of(error)
        log.warning(
            "session ended",
            error=failures.text_of(error),
            cause=cause.value,
            interrupted=len(interrupted),
            failures=self._failures,
        )
        smaller = cause is Cause.MEMORY and self._step_size.shrink(self.scheduler)
        if failed is not None and not smaller:
            self._suspect(failed, cause, failures.text_of(error))
        if self._failures >= self._config.max_failures and not self._trials.under_way:
            await self._break(f"the GPU worker failed {self._failures} times in a row", ready)
        waits = self._failures - 1 if cause is Cause.LOSS else 0
        await asyncio.sleep(self._config.retry_period_s * 2 ** min(waits, 5))

    def _suspect(self, step: Step, cause: Cause, error: str) -> None:
        """Somebody in this step may have ended the session.

        A worker's loss is bad luck the first time; a step that failed is not.
        """
        if self._trials.under_way:
            self._trials.convict()
        elif cause is not Cause.LOSS or self._failures >= LOSSES_BEFORE_SEARCH:
            known = [c for c in step.chunks if c.sequence.sequence_id in self._generations]
            self._trials.begin(known, doubtful=cause is Cause.LOSS)
        self._last_failure = error
        self._judge()

    def _judge(self) -> None:
        """End the request that was found to make steps fail; give the others back."""
        culprit = self._trials.culprit()
        if culprit is not None:
            error = self._last_failure
            log.error("culprit found", sequence_id=culprit, error=error)
            message = f"steps fail with this request, and without it they do not: {error}"
            self._fail(culprit, ServiceError(message, reason="REQUEST_FAILED"))
            # Several may be bad; a worker that fails with everybody is what gives up.
            self._culprits += 1
            self._failures = self._culprits
        self._trials.arrange(self._generations, self.scheduler, self._readmit)

    async def _break(self, reason: str, ready: Callable[[bool], Awaitable[None]]) -> None:
        """Out of order: refuse and end all requests until a session starts again."""
        log.error("out of order", reason=reason)
        self.broken = reason
        self._trials.end()
        await ready(False)
        self.fail_all(Unavailable(reason, reason="OUT_OF_ORDER", retry_after_s=5.0))
