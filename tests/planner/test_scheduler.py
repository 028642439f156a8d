"""The scheduler against a worker that remembers what each KV slot holds."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from planner.blocks import BlockPool, IntegrityError
from planner.errors import InvalidInputError
from planner.request import BlockId, Sequence, SequenceId, SequenceState
from planner.scheduler import Chunk, Scheduler, SchedulerError, SchedulerLimits, Step


class RecordingWorker:
    """Executes steps in order and checks that the KV it would read is the KV that was written."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tables: dict[SequenceId, list[BlockId]] = {}
        self.kv: dict[tuple[BlockId, int], tuple[Sequence, int]] = {}

    def execute(self, step: Step) -> None:
        for sequence_id in step.released:
            del self.tables[sequence_id]
        for chunk in step.chunks:
            self._compute(chunk)
        owned = [block for table in self.tables.values() for block in table]
        assert len(owned) == len(set(owned)), "two sequences of one step share a block"

    def _compute(self, chunk: Chunk) -> None:
        sequence_id = chunk.sequence.sequence_id
        if chunk.starts:
            assert sequence_id not in self.tables
            self.tables[sequence_id] = []
        table = self.tables[sequence_id]
        table += chunk.new_blocks
        for position in range(chunk.start_position):
            assert self.kv[self._slot(table, position)] == (chunk.sequence, position)
        for position in range(chunk.start_position, chunk.start_position + chunk.token_count):
            self.kv[self._slot(table, position)] = (chunk.sequence, position)

    def _slot(self, table: list[BlockId], position: int) -> tuple[BlockId, int]:
        return table[position // self.block_tokens], position % self.block_tokens


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, early stops, plans ahead and restarts in any order."""

    @initialize(
        total_blocks=st.integers(1, 24),
        block_tokens=st.sampled_from([1, 2, 4, 16]),
        step_tokens=st.integers(1, 40),
        running=st.none() | st.integers(1, 6),
        chunk=st.none() | st.integers(1, 9),
        pace=st.none() | st.sampled_from([0.1, 0.7, 1.0, 2.5]),
        plan_ahead=st.integers(1, 4),
    )
    def start(self, total_blocks, block_tokens, step_tokens, running, chunk, pace, plan_ahead):
        self.limits = SchedulerLimits(step_tokens, running, chunk, pace)
        self.pool = BlockPool(total_blocks, block_tokens)
        self.scheduler = Scheduler(self.pool, self.limits)
        self.worker = RecordingWorker(block_tokens)
        self.planned: deque[Step] = deque()
        self.void: list[Step] = []
        self.alive: dict[SequenceId, Sequence] = {}
        self.confirmed: dict[SequenceId, int] = {}
        self.plan_ahead = plan_ahead
        self.arrivals = 0

    @rule(data=st.data(), priority=st.sampled_from([0, 0, 0, 1]))
    def add(self, data, priority):
        capacity = self.pool.capacity_tokens
        prompt_tokens = data.draw(st.integers(1, capacity))
        max_tokens = data.draw(st.integers(1, min(capacity - prompt_tokens + 1, 30)))
        sequence = Sequence(
            SequenceId(self.arrivals),
            prompt_tokens,
            max_tokens,
            priority=priority,
            arrival=self.arrivals,
        )
        self.arrivals += 1
        self.scheduler.add(sequence)
        self.alive[sequence.sequence_id] = sequence
        self.confirmed[sequence.sequence_id] = 0

    @rule()
    def schedule(self):
        if len(self.planned) < self.plan_ahead:
            self.plan()

    def plan(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is None:
            assert self.planned or not self.alive, "work, nothing in flight, yet no step"
            return None
        self.planned.append(step)
        self.check_step(step)
        self.check_victims(step)
        return step

    def check_victims(self, step: Step) -> None:
        victims = [self.alive[i] for i in step.preempted if i in self.alive]
        if any(v.state is not SequenceState.WAITING for v in victims) or not victims:
            return  # preempted by an attempt that made no step, and started since
        kept = [
            c.sequence.order
            for c in step.chunks
            if not c.starts and c.sequence.sequence_id in self.alive
        ]
        assert max(kept) < min(v.order for v in victims), "an older one was preempted"

    def check_step(self, step: Step) -> None:
        assert 0 < step.token_count <= self.limits.max_step_tokens
        assert all(c.token_count == 1 and c.samples for c in step.chunks[: step.decode_count])
        assert all(
            chunk.token_count <= (self.limits.prefill_chunk_tokens or chunk.token_count)
            for chunk in step.chunks
        )
        ids = [chunk.sequence.sequence_id for chunk in step.chunks]
        assert len(ids) == len(set(ids)), "one sequence, two chunks"
        waiting = [s.order for s in self.alive.values() if s.state is SequenceState.WAITING]
        for chunk in step.chunks:
            sequence = chunk.sequence
            end = chunk.start_position + chunk.token_count
            assert end <= sequence.target_tokens - chunk.samples
            if chunk.starts and waiting:
                assert sequence.order < min(waiting), "the queue's head was overtaken"

    @rule(data=st.data(), stop=st.booleans())
    @precondition(lambda self: self.planned)
    def apply(self, data, stop):
        ids = [c.sequence.sequence_id for c in self.planned[0].chunks if c.samples]
        stopped = data.draw(st.sets(st.sampled_from(ids))) if stop and ids else set()
        self.finish_oldest(stopped)

    def finish_oldest(self, stopped=frozenset()) -> None:
        step = self.planned.popleft()
        self.worker.execute(step)
        sampling = [c.sequence for c in step.chunks if c.samples]
        wanted = [s for s in sampling if s.sequence_id in self.alive]
        ended = self.scheduler.apply(step, stopped)
        for sequence in wanted:
            self.confirmed[sequence.sequence_id] += 1
        expected = [
            s
            for s in wanted
            if s.sequence_id in stopped or self.confirmed[s.sequence_id] == s.max_tokens
        ]
        assert ended == expected
        for sequence in ended:
            del self.alive[sequence.sequence_id]
            assert sequence.state is SequenceState.FINISHED

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def cancel(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[sequence_id]
        assert self.scheduler.cancel(sequence_id)
        assert not self.scheduler.cancel(sequence_id)

    @rule()
    def restart(self):
        interrupted = self.scheduler.restart()
        assert interrupted == sorted(interrupted, key=lambda s: s.order)
        self.void += self.planned
        self.planned.clear()
        self.worker = RecordingWorker(self.pool.block_tokens)
        assert self.pool.used_blocks == 0
        assert self.scheduler.running == 0
        assert self.scheduler.waiting == len(self.alive)

    @rule()
    @precondition(lambda self: self.void)
    def apply_void(self):
        assert self.scheduler.apply(self.void.pop()) == []

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.running <= self.limits.running_limit
        assert self.scheduler.steps_in_flight == len(self.planned)
        for sequence_id, sequence in self.alive.items():
            assert sequence.generated_tokens == self.confirmed[sequence_id]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.alive:
            while len(self.planned) < self.plan_ahead and self.plan():
                pass
            self.finish_oldest()
        while self.planned:
            self.finish_oldest()
        assert self.scheduler.running == self.scheduler.waiting == 0
        assert self.scheduler.schedule() is None
        self.scheduler.check_integrity()
        assert self.pool.free_blocks == self.pool.total_blocks


def test_every_history_leaves_kv_intact_and_all_blocks_free():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=500, stateful_step_count=40, deadline=None),
    )


def scheduler_of(total_blocks: int, *, block_tokens: int = 16, **limits) -> Scheduler:
    limits.setdefault("max_step_tokens", 1000)
    return Scheduler(BlockPool(total_blocks, block_tokens), SchedulerLimits(**limits))


def sequence_of(number: int, prompt_tokens: int, max_tokens: int, **kwargs) -> Sequence:
    return Sequence(SequenceId(number), prompt_tokens, max_tokens, arrival=number, **kwargs)


def run_all(scheduler: Scheduler) -> list[Step]:
    steps = []
    while step := scheduler.schedule():
        steps.append(step)
        scheduler.apply(step)
    return steps


def started(step: Step) -> list[int]:
    return [chunk.sequence.sequence_id for chunk in step.chunks if chunk.starts]


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_step():
    scheduler = scheduler_of(100, max_step_tokens=32)
    scheduler.add(sequence_of(0, 20, 8))
    first = scheduler.schedule()
    scheduler.apply(first)
    scheduler.add(sequence_of(1, 50, 2))
    second = scheduler.schedule()
    assert [(c.sequence.sequence_id, c.token_count) for c in second.chunks] == [(0, 1), (1, 31)]
    assert [c.samples for c in second.chunks] == [True, False]
    scheduler.apply(second)
    third = scheduler.schedule()
    assert [(c.start_position, c.token_count) for c in third.chunks] == [(20 + 1, 1), (31, 19)]


def test_preemption_takes_the_youngest_and_keeps_its_tokens():
    scheduler = scheduler_of(4, block_tokens=4)
    scheduler.add(sequence_of(0, 4, 8))
    scheduler.add(sequence_of(1, 4, 8))
    steps = run_all(scheduler)
    evicting = next(step for step in steps if step.preempted)
    assert evicting.preempted == [1]
    assert evicting.released == [1]
    again = next(
        chunk
        for step in steps[steps.index(evicting) :]
        for chunk in step.chunks
        if chunk.starts and chunk.sequence.sequence_id == 1
    )
    assert again.token_count > 4, "the generated tokens were not kept"
    assert scheduler.num_preemptions >= 1
    assert all(chunk.sequence.generated_tokens == 8 for chunk in steps[0].chunks)


def test_lower_priority_is_preempted_before_the_younger():
    scheduler = scheduler_of(4, block_tokens=4)
    scheduler.add(sequence_of(0, 4, 8, priority=0))
    scheduler.add(sequence_of(1, 4, 8, priority=1))
    evicting = next(step for step in run_all(scheduler) if step.preempted)
    assert evicting.preempted == [0]


@pytest.mark.parametrize("pace", [0.3, 1.0, 8.9])
def test_pace_carries_its_fraction(pace):
    scheduler = scheduler_of(100_000, max_step_tokens=100_000, prompts_per_step=pace)
    for number in range(900):
        scheduler.add(sequence_of(number, 1, 500))
    starts = [len(started(scheduler.schedule())) for _ in range(90)]
    # The first prompt of an idle machine does not wait for its credit.
    assert sum(starts) in {int(90 * pace + 1e-6), int(90 * pace + 1 - pace + 1e-6)}
    assert max(starts) - min(starts[1:]) <= 1


def test_pace_is_not_hoarded_while_kv_is_full():
    scheduler = scheduler_of(8, block_tokens=4, prompts_per_step=2.0)
    for number in range(30):
        scheduler.add(sequence_of(number, 13, 4))  # four blocks each: two at a time
    assert max(len(started(step)) for step in run_all(scheduler)) <= 3


def test_planning_ahead_costs_no_capacity():
    def steps_needed(plan_ahead: int) -> int:
        scheduler = scheduler_of(8, block_tokens=4)
        for number in range(40):
            scheduler.add(sequence_of(number, 5, 4))
        planned, count = deque(), 0
        while True:
            while len(planned) < plan_ahead and (step := scheduler.schedule()):
                planned.append(step)
            if not planned:
                return count
            scheduler.apply(planned.popleft())
            count += 1

    assert steps_needed(1) == steps_needed(2) == steps_needed(3)


def test_resumed_sequence_computes_its_known_tokens_first():
    scheduler = scheduler_of(100)
    scheduler.add(sequence_of(0, 10, 5, generated_tokens=3))
    steps = run_all(scheduler)
    assert [step.token_count for step in steps] == [13, 1]


def test_single_token_request_needs_one_step():
    scheduler = scheduler_of(1)
    scheduler.add(sequence_of(0, 16, 1))
    assert len(run_all(scheduler)) == 1
    assert scheduler.pool.free_blocks == 1


def test_what_never_fits_is_refused_naming_the_blocks():
    scheduler = scheduler_of(4)
    scheduler.add(sequence_of(0, 60, 5))  # the last token needs no KV: 64 tokens, 4 blocks
    with pytest.raises(SchedulerError, match="need 5 KV blocks of 16 tokens; the pool has 4"):
        scheduler.add(sequence_of(1, 60, 6))


def test_duplicate_id_is_refused_while_it_is_in_use():
    scheduler = scheduler_of(4)
    scheduler.add(sequence_of(7, 3, 1))
    with pytest.raises(SchedulerError, match="sequence_id 7 is in use"):
        scheduler.add(sequence_of(7, 3, 1))
    run_all(scheduler)
    scheduler.add(sequence_of(7, 3, 1))


def test_steps_are_applied_in_order():
    scheduler = scheduler_of(4)
    scheduler.add(sequence_of(0, 3, 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(SchedulerError, match="not the oldest"):
        scheduler.apply(second)
    scheduler.apply(first)
    scheduler.apply(second)


def test_cancelled_waiting_requests_do_not_pile_up():
    scheduler = scheduler_of(1)
    scheduler.add(sequence_of(0, 16, 1))
    for number in range(1, 1000):
        scheduler.add(sequence_of(number, 1, 1))
        scheduler.cancel(SequenceId(number))
    assert len(scheduler._waiting) <= 3
    assert scheduler.waiting == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_step_tokens", 0),
        ("max_running_sequences", 0),
        ("prefill_chunk_tokens", -1),
        ("prompts_per_step", 0.0),
        ("prompts_per_step", float("nan")),
        ("prompts_per_step", float("inf")),
    ],
)
def test_limits_that_make_no_sense_name_their_field(field, value):
    with pytest.raises(InvalidInputError, match=field):
        SchedulerLimits(**{"max_step_tokens": 1, field: value})


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("prompt_tokens", {"prompt_tokens": 0, "max_tokens": 1}),
        ("max_tokens", {"prompt_tokens": 1, "max_tokens": 0}),
        ("generated_tokens", {"prompt_tokens": 1, "max_tokens": 2, "generated_tokens": 2}),
    ],
)
def test_sequences_that_make_no_sense_name_their_field(field, arguments):
    with pytest.raises(InvalidInputError, match=field):
        Sequence(SequenceId(0), **arguments)


def test_integrity_check_notices_a_lost_block():
    scheduler = scheduler_of(4)
    scheduler.add(sequence_of(0, 20, 5))
    chunk = scheduler.schedule().chunks[0]
    scheduler.check_integrity()
    chunk.sequence.blocks.pop()
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
