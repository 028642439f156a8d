"""The simulation against Stage 1, Stage 2 and the counts that it must keep."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.blocks import BlockPool
from planner.costs import IterationCosts, StepLoad
from planner.errors import InvalidInputError
from planner.request import Sequence, SequenceId
from planner.scheduler import Scheduler, SchedulerError, SchedulerLimits
from planner.simulate import Request, Simulation, simulate
from planner.stage1 import stage1
from planner.stage2 import kv_prompts_per_step, sequence_kv_token_steps, stage2

ONE_SECOND = IterationCosts.constant(1.0)
N_REAL_TOKENS = 18_236  # of Mixtral-8x7B on the paper's testbed
STREAM_S = 4.82
KV_TOKENS_PER_GB = 1e9 / 131_072  # BF16 KV of Mixtral-8x7B


def simulate_uniform(prompt, generate, requests, kv_tokens, block, q, n_real=10**9):
    return simulate(
        [Request(prompt, generate)] * requests,
        ONE_SECOND,
        SchedulerLimits(n_real, prompts_per_step=q),
        kv_blocks=int(kv_tokens) // block,
        block_tokens=block,
    )


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 80),
    st.integers(2, 12),
    st.sampled_from([1, 4, 16]),
    st.floats(1, 10),
)
def test_agrees_with_stage_2_within_3_percent(prompt, generate, block, wanted_q):
    """For pools of 20 sequences and more: below, whole sequences do not make up a fluid q."""
    held = sequence_kv_token_steps(prompt, generate, block)
    kv_tokens = math.ceil(wanted_q * held / block) * block
    q = kv_tokens / held
    assume(q * generate >= 20 and kv_tokens >= prompt + generate + block)
    requests = math.ceil(20 * q * generate)
    expected = stage2(prompt, generate, requests, kv_tokens, block, 1.0, None)
    result = simulate_uniform(prompt, generate, requests, kv_tokens, block, q)
    assert result.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=0.03)


@pytest.mark.parametrize(
    ("kv_gb", "prompt", "generate"),
    [(70, 98, 32), (70, 98, 64), (210, 98, 64), (70, 926, 128), (16, 128, 256)],
)
def test_agrees_with_stage_2_on_a_tenth_of_the_testbed(kv_gb, prompt, generate):
    kv_tokens = int(kv_gb * KV_TOKENS_PER_GB / 10)
    n_real = N_REAL_TOKENS // 10
    kv_q = kv_prompts_per_step(prompt, generate, kv_tokens, 16)
    q = min(kv_q, n_real / (prompt + generate))
    requests = math.ceil(20 * q * generate)
    expected = stage2(prompt, generate, requests, kv_tokens, 16, 1.0, float(n_real))
    result = simulate_uniform(prompt, generate, requests, kv_tokens, 16, q, n_real)
    assert result.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=0.03)


@pytest.mark.parametrize(
    ("prompt", "generate", "q", "n_real", "limit"),
    [
        (200, 4, 6.0, 10**9, "kv_capacity"),
        (150, 5, 8.5, 10**9, "kv_capacity"),
        (150, 5, 9.0, 700, "gpu"),
    ],
)
def test_agrees_with_stage_1_within_2_percent_for_very_many_requests(
    prompt, generate, q, n_real, limit
):
    kv_tokens = math.ceil(q * sequence_kv_token_steps(prompt, generate, 1))
    bound = stage1(prompt, generate, kv_tokens, 1.0, float(n_real))
    assert bound.limit == limit
    pace = min(q, n_real / (prompt + generate))
    requests = math.ceil(1000 * pace * generate)
    result = simulate_uniform(prompt, generate, requests, kv_tokens, 1, pace, n_real)
    assert result.tokens_per_s == pytest.approx(bound.tokens_per_s, rel=0.02)


@pytest.mark.parametrize(("kv_gb", "least", "most"), [(70, 0.30, 0.55), (210, 0.0, 0.02)])
def test_preemption_of_the_paper(kv_gb, least, most):
    """About half of the time at 70 GB and g = 64, rare at 210 GB."""
    result = simulate_uniform(
        98, 64, 20_000, kv_gb * KV_TOKENS_PER_GB, 16, N_REAL_TOKENS / 162, N_REAL_TOKENS
    )
    assert least <= result.preemption_share <= most
    assert result.evicting_share <= result.preemption_share


lengths = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5), st.floats(0, 20)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    lengths,
    st.integers(60, 200),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 50),
    st.integers(1, 3),
    st.none() | st.floats(0.2, 5),
)
def test_every_request_ends_and_the_counts_agree(drawn, kv_tokens, block, step, ahead, pace):
    requests = [Request(p, g, max_tokens=g + beyond, arrival_s=at) for p, g, beyond, at in drawn]
    kv_blocks = -(-kv_tokens // block)
    simulation = Simulation(
        requests,
        IterationCosts.constant(0.5),
        SchedulerLimits(step, prompts_per_step=pace),
        kv_blocks=kv_blocks,
        block_tokens=block,
        plan_ahead=ahead,
    )
    steps = list(simulation.run())
    result = simulation.result(steps)
    simulation.scheduler.check_integrity()
    assert simulation.scheduler.pool.free_blocks == kv_blocks
    assert steps[-1].finished == result.requests == len(requests)
    assert result.generated_tokens == sum(g for _, g, _, _ in drawn)
    sampled = sum(record.load.sampled_tokens for record in steps)
    assert sampled >= result.generated_tokens
    if not any(beyond for _, _, beyond, _ in drawn):
        assert sampled == result.generated_tokens
    assert [record.number for record in steps] == list(range(len(steps)))
    for before, after in pairwise(steps):
        assert after.start_s >= before.start_s + before.duration_s
        assert after.finished >= before.finished
    assert all(0 < record.load.tokens <= step for record in steps)
    assert all(record.kv_blocks <= kv_blocks for record in steps)
    assert sum(record.preempted for record in steps) <= result.num_preemptions


def test_is_the_serving_scheduler_step_by_step():
    """No second copy: a scheduler driven by hand plans the same loads."""
    drawn = [(20 + 7 * i % 50, 3 + i % 9) for i in range(60)]
    limits = SchedulerLimits(100, prompts_per_step=1.7, prefill_chunk_tokens=30)
    result = simulate(
        [Request(p, g) for p, g in drawn], ONE_SECOND, limits, kv_blocks=20, block_tokens=16
    )
    scheduler = Scheduler(BlockPool(20, 16), limits)
    for i, (p, g) in enumerate(drawn):
        scheduler.add(Sequence(SequenceId(i), p, g, arrival=i))
    by_hand = []
    while step := scheduler.schedule():
        by_hand.append(StepLoad.of(step))
        scheduler.apply(step)
    assert [record.load for record in result.steps] == by_hand
    assert result.num_preemptions == scheduler.num_preemptions > 0


def test_late_arrivals_wait_for_their_time_and_idle_time_counts():
    requests = [Request(4, 2), Request(4, 2, arrival_s=10.0)]
    result = simulate(requests, ONE_SECOND, SchedulerLimits(100), kv_blocks=4)
    assert [record.start_s for record in result.steps] == [0.0, 1.0, 10.0, 11.0]
    assert result.total_s == 12.0
    assert result.busy_s == 4.0


def test_a_request_that_stops_early_frees_its_place_and_wastes_the_planned_token():
    def tokens(plan_ahead):
        result = simulate(
            [Request(4, 3, max_tokens=50)],
            ONE_SECOND,
            SchedulerLimits(100),
            kv_blocks=8,
            plan_ahead=plan_ahead,
        )
        assert result.generated_tokens == 3
        return [record.load.tokens for record in result.steps]

    assert tokens(1) == [4, 1, 1]
    assert tokens(2) == [4, 1, 1, 1]


def test_planning_ahead_does_not_change_the_throughput_of_known_lengths():
    def steps(plan_ahead):
        return len(
            simulate(
                [Request(20, 10)] * 500,
                ONE_SECOND,
                SchedulerLimits(300),
                kv_blocks=60,
                plan_ahead=plan_ahead,
            ).steps
        )

    assert steps(2) == pytest.approx(steps(1), rel=0.02)


def test_a_scaled_simulation_stands_for_the_whole():
    """A tenth of the pool, the pace and the requests at ten times the load."""
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    costs = IterationCosts.from_specs(model, machine)
    whole = simulate(
        [Request(98, 64)] * 10_000,
        costs,
        SchedulerLimits(18_000, prompts_per_step=110.0),
        kv_blocks=30_000,
    )
    part = simulate(
        [Request(98, 64)] * 1_000,
        costs,
        SchedulerLimits(1_800, prompts_per_step=11.0),
        kv_blocks=3_000,
        scale=10.0,
    )
    assert part.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.02)
    assert part.generated_tokens == whole.generated_tokens
    assert part.preemption_share == pytest.approx(whole.preemption_share, abs=0.05)


def test_time_by_limit_adds_up_to_the_busy_time():
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    result = simulate(
        [Request(926, 128)] * 500,
        IterationCosts.from_specs(model, machine),
        SchedulerLimits(N_REAL_TOKENS),
        kv_blocks=30_000,
    )
    assert math.fsum(result.seconds_by_limit.values()) == pytest.approx(result.busy_s)
    assert set(result.seconds_by_limit) <= {"link", "device", "attention", "host_memory", "head"}


def test_what_never_fits_is_refused():
    simulation = Simulation([Request(100, 10)], ONE_SECOND, SchedulerLimits(100), kv_blocks=2)
    with pytest.raises(SchedulerError, match="the pool has 2"):
        list(simulation.run())


@pytest.mark.parametrize(
    ("field", "requests", "options"),
    [
        ("requests", [], {}),
        ("generated_tokens", [Request(3, 5, max_tokens=4)], {}),
        ("generated_tokens", [Request(3, 0)], {}),
        ("prompt_tokens", [Request(0, 5)], {}),
        ("plan_ahead", [Request(3, 5)], {"plan_ahead": 0}),
    ],
)
def test_wrong_input_names_its_field(field, requests, options):
    with pytest.raises(InvalidInputError) as error:
        simulate(requests, ONE_SECOND, SchedulerLimits(100), kv_blocks=9, **options)
    assert error.value.field == field
