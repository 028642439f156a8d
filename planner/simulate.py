"""The iteration simulation: the real scheduler over given requests, a step at a time.

What is simulated is time alone: `IterationCosts` says how long each planned step takes, and the
step's tokens are confirmed when that time has passed. With uniform lengths, a constant step time
and a constant q it reproduces Stage 2.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from planner.blocks import BlockPool
from planner.costs import IterationCosts, IterationTime, StepLoad
from planner.errors import InvalidInputError
from planner.request import Sequence, SequenceId
from planner.scheduler import Chunk, Scheduler, SchedulerLimits, Step


class Request(NamedTuple):
    """One request. `generated_tokens` is what it really generates; `max_tokens`, when above that,
    is the limit that the scheduler knows (it stops early, as at an end-of-text token)."""

    prompt_tokens: int
    generated_tokens: int
    max_tokens: int | None = None
    arrival_s: float = 0.0
    priority: int = 0


class StepRecord(NamedTuple):
    """One simulated iteration. KV use is that of the step's plan; counts are after it."""

    number: int
    start_s: float
    time: IterationTime
    load: StepLoad
    kv_blocks: int
    running: int
    waiting: int
    preempted: int  # sequences that this step evicted
    evicted: int  # sequences evicted and not started again when the step began, or by it
    recomputed: int  # sequences that this step starts again
    finished: int  # requests done when it ends, over all steps

    @property
    def duration_s(self) -> float:
        return self.time.total_s

    @property
    def under_preemption(self) -> bool:
        """Whether some sequence is evicted or being computed again."""
        return self.evicted > 0 or self.recomputed > 0


@dataclass(frozen=True)
class SimulationResult:
    """Totals of a simulation, and its steps in order. Tokens are prompt and generated ones of the
    requests, whatever was computed twice; seconds are simulated."""

    steps: list[StepRecord]
    requests: int
    prompt_tokens: float
    generated_tokens: float
    num_preemptions: int
    kv_blocks: int

    @property
    def total_s(self) -> float:
        """From the first arrival's step to the end of the last step, idle time included."""
        last = self.steps[-1]
        return last.start_s + last.duration_s

    @property
    def busy_s(self) -> float:
        return fsum(step.duration_s for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.generated_tokens) / self.total_s

    @property
    def generated_tokens_per_s(self) -> float:
        return self.generated_tokens / self.total_s

    @property
    def preemption_share(self) -> float:
        """Share of busy time with some sequence evicted or being computed again (0 … 1)."""
        return self._share(lambda step: step.under_preemption)

    @property
    def evicting_share(self) -> float:
        """Share of busy time of the steps that evict (0 … 1)."""
        return self._share(lambda step: step.preempted > 0)

    @property
    def seconds_by_limit(self) -> dict[str, float]:
        """Busy time by the limiting resource, longest first."""
        seconds: dict[str, float] = {}
        for step in self.steps:
            seconds[step.time.limit] = seconds.get(step.time.limit, 0.0) + step.duration_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def mean_kv_use_share(self) -> float:
        """KV blocks in use over all blocks, weighted by time (0 … 1)."""
        used = fsum(step.kv_blocks * step.duration_s for step in self.steps)
        return used / (self.kv_blocks * self.busy_s)

    @property
    def mean_step_tokens(self) -> float:
        return fsum(step.load.tokens for step in self.steps) / len(self.steps)

    def _share(self, condition: Callable[[StepRecord], bool]) -> float:
        return fsum(s.duration_s for s in self.steps if condition(s)) / self.busy_s


class Simulation:
    """Requests through a scheduler of their own; `run()` yields each iteration as it ends.

    `plan_ahead` steps are planned before the result of the first is known, as the engine does.
    With `scale` the pool, limits and requests are one part in `scale` of the real ones: each step
    is charged as one with `scale` times the load.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        costs: IterationCosts,
        limits: SchedulerLimits,
        *,
        kv_blocks: int,
        block_tokens: int = 16,
        plan_ahead: int = 1,
        scale: float = 1.0,
    ) -> None:
        if plan_ahead < 1:
            raise InvalidInputError("plan_ahead", f"must be at least 1, is {plan_ahead}")
        self.scheduler = Scheduler(BlockPool(kv_blocks, block_tokens), limits)
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._costs = costs
        self._plan_ahead = plan_ahead
        self._scale = scale
        self._stops: dict[SequenceId, int] = {}  # those that end before max_tokens
        self._arrivals = deque(self._sequences(requests))
        if not self._arrivals:
            raise InvalidInputError("requests", "must be at least one")
        self._evicted: set[SequenceId] = set()
        self._finished = 0

    def run(self) -> Iterator[StepRecord]:
        """Simulate to the end. Raises SchedulerError when a request can never fit the pool."""
        clock_s = 0.0
        planned: deque[tuple[Step, StepRecord]] = deque()
        while True:
            self._admit_until(clock_s)
            while len(planned) < self._plan_ahead and (plan := self._plan()):
                planned.append(plan)
            if not planned:
                if not self._arrivals:
                    return
                clock_s = self._arrivals[0][0]
                continue
            step, record = planned.popleft()
            self._finished += len(self.scheduler.apply(step, self._stopped_by(step)))
            yield record._replace(start_s=clock_s, finished=self._finished)
            clock_s += record.duration_s

    def result(self, steps: list[StepRecord]) -> SimulationResult:
        """The totals, once `run()` has ended; `steps` are what it yielded."""
        return SimulationResult(
            steps=steps,
            requests=self.requests,
            prompt_tokens=self.prompt_tokens * self._scale,
            generated_tokens=self.generated_tokens * self._scale,
            num_preemptions=self.scheduler.num_preemptions,
            kv_blocks=self.scheduler.pool.total_blocks,
        )

    def _sequences(self, requests: Iterable[Request]) -> list[tuple[float, Sequence]]:
        """(arrival_s, sequence) in order of arrival; equal times keep the order given."""
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        arrivals = []
        for index, request in enumerate(ordered):
            sequence_id = SequenceId(index)
            limit = request.max_tokens or request.generated_tokens
            if not 1 <= request.generated_tokens <= limit:
                problem = f"must be in 1 … max_tokens {limit}, is {request.generated_tokens}"
                raise InvalidInputError("generated_tokens", problem)
            if limit > request.generated_tokens:
                self._stops[sequence_id] = request.generated_tokens
            sequence = Sequence(
                sequence_id,
                request.prompt_tokens,
                limit,
                priority=request.priority,
                arrival=index,
            )
            arrivals.append((request.arrival_s, sequence))
            self.prompt_tokens += request.prompt_tokens
            self.generated_tokens += request.generated_tokens
        self.requests = len(arrivals)
        return arrivals

    def _admit_until(self, clock_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= clock_s:
            self.scheduler.add(self._arrivals.popleft()[1])

    def _plan(self) -> tuple[Step, StepRecord] | None:
        """The next step and its record, but for when it runs."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is None:
            return None
        load = StepLoad.of(step)
        charged = load if self._scale == 1 else load.scaled(self._scale)
        evicted_before = len(self._evicted)
        restarted = self._follow_evictions(step)
        record = StepRecord(
            number=step.step_id,
            start_s=0.0,
            time=self._costs.iteration(charged),
            load=charged,
            kv_blocks=scheduler.pool.used_blocks,
            running=scheduler.running,
            waiting=scheduler.waiting,
            preempted=len(step.preempted),
            evicted=max(evicted_before, len(self._evicted)),
            recomputed=restarted,
            finished=0,
        )
        return step, record

    def _follow_evictions(self, step: Step) -> int:
        """Note who is evicted now; returns how many the step starts again."""
        self._evicted.update(step.preempted)
        again = 0
        for chunk in step.chunks[step.decode_count :]:
            sequence_id = chunk.sequence.sequence_id
            if chunk.starts and sequence_id in self._evicted:
                self._evicted.remove(sequence_id)
                again += 1
        return again

    def _stopped_by(self, step: Step) -> list[SequenceId]:
        """Sequences whose last wanted token the step samples although their limit is higher."""
        if not self._stops:
            return []
        stopped = [s for chunk in step.chunks if (s := self._stop_of(chunk)) is not None]
        self._evicted.difference_update(stopped)
        return stopped

    def _stop_of(self, chunk: Chunk) -> SequenceId | None:
        sequence = chunk.sequence
        if chunk.samples and sequence.generated_tokens + 1 == self._stops.get(sequence.sequence_id):
            return sequence.sequence_id
        return None


def simulate(
    requests: Iterable[Request],
    costs: IterationCosts,
    limits: SchedulerLimits,
    *,
    kv_blocks: int,
    block_tokens: int = 16,
    plan_ahead: int = 1,
    scale: float = 1.0,
) -> SimulationResult:
    """Run a `Simulation` to its end."""
    simulation = Simulation(
        requests,
        costs,
        limits,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        plan_ahead=plan_ahead,
        scale=scale,
    )
    return simulation.result(list(simulation.run()))
