"""Cost terms of an iteration: scaling laws, limits, and how modes add them up."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.blocks import BlockPool
from planner.costs import ExecutionMode, IterationCosts, PiecewiseLine, StepLoad
from planner.errors import InvalidInputError
from planner.hardware import Curve
from planner.request import Sequence, SequenceId
from planner.scheduler import Scheduler, SchedulerLimits

laws = settings(max_examples=300, deadline=None)
magnitudes = st.just(0.0) | st.floats(1e-6, 10)

# Powers of two, so that sums in tests are exact: 10 layers of 64 B over 16 B/s, 4 s each.
COSTS = IterationCosts(
    n_layers=10,
    layer_bytes=64.0,
    device_time=PiecewiseLine.affine(0.5, 0.25),
    link_h2d_bytes_per_s=16.0,
    link_d2h_bytes_per_s=16.0,
    to_host_bytes_per_token=1.0,
    to_device_bytes_per_token=0.5,
    kv_bytes_per_token=2.0,
    attention_bytes_per_s=64.0,
    attention_sequence_s=0.125,
    host_read_bytes_per_s=128.0,
)
LOAD = StepLoad(tokens=8, sampled_tokens=8, sequences=8, decode_sequences=8, decode_kv_tokens=64)

loads = st.builds(
    lambda decodes, context, prefill: StepLoad(
        tokens=decodes + prefill,
        sampled_tokens=decodes,
        sequences=decodes + (prefill > 0),
        decode_sequences=decodes,
        decode_kv_tokens=decodes * context,
        prefill_own_pairs=prefill * (prefill + 1) / 2,
    ),
    st.integers(0, 500),
    st.integers(1, 2000),
    st.integers(0, 2000),
)
costs = st.builds(
    lambda **values: replace(COSTS, **values),
    link_h2d_bytes_per_s=st.none() | st.floats(1, 1e3),
    attention_bytes_per_s=st.none() | st.floats(1, 1e3),
    host_read_bytes_per_s=st.none() | st.floats(1, 1e3),
    link_slowdown=st.floats(0, 0.9),
    resident_share=st.floats(0, 1),
    mode=st.sampled_from(ExecutionMode),
    n_groups=st.sampled_from([1, 2]),
)


def test_terms_are_those_of_the_formulas():
    time = COSTS.iteration(LOAD)
    assert time.h2d_s == 10 * (64 + 8 * 0.5) / 16
    assert time.d2h_s == 10 * 8 / 16
    assert time.device_s == 10 * 2 * (0.5 + 0.25 * 4)  # two groups of four tokens
    assert time.attention_s == 10 * (64 * 2 / 64 + 8 * 0.125)
    assert time.host_memory_s == 10 * (64 + 64 * 2) / 128
    assert time.total_s == time.h2d_s
    assert time.limit == "link"


def test_compute_bound_pipeline_takes_the_longer_side_and_its_prologue():
    time = replace(COSTS, link_h2d_bytes_per_s=1e9).iteration(LOAD)
    assert time.device_s == time.attention_s == 30
    assert time.total_s == 30 + 3 / 2  # half of one layer's shorter side fills the pipeline
    assert time.limit == "device"


def test_modes_take_the_largest_or_the_sum():
    pipelined = COSTS.iteration(LOAD)
    shared = replace(COSTS, mode=ExecutionMode.SHARED_CORES).iteration(LOAD)
    sequential = replace(COSTS, mode=ExecutionMode.SEQUENTIAL).iteration(LOAD)
    assert pipelined.total_s == 42.5
    assert shared.total_s == 30 + 30
    assert sequential.total_s == 30 + 30 + 42.5 + 5
    assert (pipelined.limit, shared.limit, sequential.limit) == ("link", "device", "link")


def test_slowdown_is_the_link_at_reduced_rate_while_attention_runs():
    """At rate 1-κ for t_c seconds, then at full rate: h2d + κ·t_c."""
    base = COSTS.iteration(LOAD)
    slowed = replace(COSTS, link_slowdown=0.5).iteration(LOAD)
    assert slowed.h2d_s == base.h2d_s + 0.5 * base.attention_s
    long_attention = replace(COSTS, link_slowdown=0.5, attention_bytes_per_s=1.0)
    assert long_attention.iteration(LOAD).h2d_s == 2 * base.h2d_s


def test_papers_failure_case():
    """210 GB of KV at g = 256: streaming grows from about 5 s to about 6 s a pass."""
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    costs = IterationCosts.from_specs(model, machine)
    idle = costs.iteration(StepLoad(tokens=1))
    kv_tokens = 210e9 / model.kv_bytes_per_token
    sequences = kv_tokens / 226
    busy = costs.iteration(StepLoad(sequences, sequences, sequences, sequences, kv_tokens))
    assert idle.h2d_s == pytest.approx(4.8, abs=0.1)
    assert 5.6 < busy.h2d_s < 6.4
    assert busy.limit == "link"


def test_resident_layers_are_not_streamed():
    half = replace(COSTS, resident_share=0.5, to_device_bytes_per_token=0.0)
    none = replace(half, resident_share=0.0)
    assert half.iteration(LOAD).h2d_s == none.iteration(LOAD).h2d_s / 2
    assert none.iteration(LOAD).total_s / half.iteration(LOAD).total_s > 1.25


def test_link_copies_that_take_device_time_slow_it():
    slowed = replace(COSTS, device_slowdown=0.5, mode=ExecutionMode.SHARED_CORES)
    base = COSTS.iteration(LOAD)
    time = slowed.iteration(LOAD)
    assert time.device_s + time.attention_s == pytest.approx(60 + 0.5 * base.h2d_s)


def test_prefill_pairs_are_charged_where_they_are_computed():
    load = StepLoad(tokens=16, prefill_own_pairs=100, prefill_earlier_pairs=50)
    costs = replace(COSTS, device_pair_s=1.0, attention_pair_s=2.0, attention_fixed_s=3.0)
    bare = COSTS.iteration(load).device_s
    on_device = costs.iteration(load)
    assert on_device.device_s - bare == 10 * 100
    assert on_device.attention_s == 10 * (2 * 50 + 2 * 3)
    on_cpu = replace(costs, prefill_on_cpu=True).iteration(load)
    assert on_cpu.device_s == bare
    assert on_cpu.attention_s == 10 * (2 * 150 + 2 * 3)


def test_windowed_layers_read_no_further_than_their_window():
    windowed = replace(COSTS, windowed_share=0.5, window_tokens=4)  # contexts are 8
    read_s = COSTS.iteration(LOAD).attention_s - 10 * 8 * 0.125
    assert windowed.iteration(LOAD).attention_s - 10 * 8 * 0.125 == 0.75 * read_s


def test_head_and_overhead_are_added_and_can_be_the_limit():
    costs = replace(
        COSTS,
        head_fixed_s=1.0,
        head_token_s=0.5,
        overhead_fixed_s=2.0,
        overhead_sequence_s=0.25,
    )
    time = costs.iteration(LOAD)
    assert (time.head_s, time.overhead_s) == (5.0, 4.0)
    # The link limits: of the 9 s it works ahead for two layers, 4 s each.
    assert time.hidden_s == 8.0
    assert time.total_s == 42.5 + 9 - 8
    nothing_to_hide = replace(costs, device_time=PiecewiseLine.affine(9.0, 0.0)).iteration(LOAD)
    assert nothing_to_hide.hidden_s == 0
    assert nothing_to_hide.total_s == nothing_to_hide.layers_s + 9
    assert replace(costs, overhead_fixed_s=1e4).iteration(LOAD).limit == "overhead"


@laws
@given(costs, loads, st.integers(1, 8))
def test_time_is_linear_in_layers_but_for_the_prologue(costs, load, times):
    once = costs.iteration(load)
    more = replace(costs, n_layers=times * costs.n_layers).iteration(load)
    assert more.device_s == pytest.approx(times * once.device_s)
    assert more.layers_s <= times * once.layers_s * (1 + 1e-9)
    fill_s = min(once.device_s, once.attention_s) / costs.n_layers
    assert more.layers_s >= times * (once.layers_s - fill_s) * (1 - 1e-9)


@laws
@given(costs, loads)
def test_layers_take_no_less_than_any_resource_and_no_more_than_their_sum(costs, load):
    time = costs.iteration(load)
    resources = (time.h2d_s, time.d2h_s, time.device_s, time.attention_s, time.host_memory_s)
    assert max(resources) * (1 - 1e-9) <= time.layers_s
    assert time.layers_s <= sum(resources) * (1 + 1e-9)
    assert time.total_s == time.layers_s + time.head_s + time.overhead_s
    busiest = {
        "link": time.h2d_s,
        "link_d2h": time.d2h_s,
        "device": time.device_s,
        "attention": time.attention_s,
        "host_memory": time.host_memory_s,
    }
    assert time.limit in busiest
    if costs.mode is not ExecutionMode.SHARED_CORES and costs.n_groups == 2 and load.tokens > 1:
        assert busiest[time.limit] >= max(resources) * (1 - 1e-9)


@laws
@given(costs, loads, st.integers(1, 100))
def test_more_work_never_takes_less_time(costs, load, more):
    base = costs.iteration(load).total_s
    longer = load._replace(decode_kv_tokens=load.decode_kv_tokens + more)
    assert costs.iteration(longer).total_s >= base * (1 - 1e-9)
    wider = load._replace(
        tokens=load.tokens + more, prefill_own_pairs=load.prefill_own_pairs + more
    )
    if load.tokens >= 2:  # below, there is no second group, whose fixed part it would save
        assert costs.iteration(wider).total_s >= base * (1 - 1e-9)


@laws
@given(loads, st.floats(1, 20))
def test_twice_the_rates_is_half_the_time(load, factor):
    costs = replace(COSTS, device_time=PiecewiseLine.affine(0, 0.25), attention_sequence_s=0.0)
    faster = replace(
        costs,
        device_time=PiecewiseLine.affine(0, 0.25 / factor),
        link_h2d_bytes_per_s=factor * 16.0,
        link_d2h_bytes_per_s=factor * 16.0,
        attention_bytes_per_s=factor * 64.0,
        host_read_bytes_per_s=factor * 128.0,
    )
    assert faster.iteration(load).total_s == pytest.approx(costs.iteration(load).total_s / factor)


@laws
@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 10)), min_size=2, max_size=6),
    st.floats(0, 2e3),
)
def test_piecewise_line_goes_through_its_points(points, x):
    points = sorted({round(a, 3): b for a, b in points}.items())
    if len(points) < 2:
        return
    line = PiecewiseLine(tuple(points))
    for at, value in points:
        assert line.at(at) == pytest.approx(value, abs=1e-6)
    assert line.at(x) >= 0
    for (a, ya), (b, yb) in pairwise(points):
        assert line.at((a + b) / 2) == pytest.approx((ya + yb) / 2, abs=1e-6)


@laws
@given(magnitudes, magnitudes, st.floats(0, 1e4))
def test_affine_and_roofline_are_what_they_say(fixed_s, per_unit_s, count):
    affine = PiecewiseLine.affine(fixed_s, per_unit_s).at(count)
    assert affine == pytest.approx(fixed_s + per_unit_s * count, rel=1e-6, abs=1e-9)
    roofline = PiecewiseLine.roofline(fixed_s, per_unit_s).at(count)
    assert roofline == pytest.approx(max(fixed_s, per_unit_s * count), rel=1e-6, abs=1e-9)


def test_load_counts_pairs_and_kv_of_a_step():
    scheduler = Scheduler(BlockPool(100), SchedulerLimits(40))
    scheduler.add(Sequence(SequenceId(0), 10, 5, arrival=0))
    scheduler.apply(scheduler.schedule())
    scheduler.add(Sequence(SequenceId(1), 60, 5, arrival=1))
    first = scheduler.schedule()
    assert StepLoad.of(first) == StepLoad(40, 1, 2, 1, 11, 39 * 40 / 2, 0)
    second = scheduler.schedule()
    assert StepLoad.of(second) == StepLoad(22, 2, 2, 1, 12, 21 * 22 / 2, 21 * 39)
    assert first.token_count == 40


def test_specifications_give_the_papers_terms():
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    costs = IterationCosts.from_specs(model, machine)
    time = costs.iteration(StepLoad(tokens=18_236))
    stream_s = model.streamed_bytes_per_pass / 19.5e9
    # n_real is where the device's time meets the link's; embedding and head make 2 % of it.
    assert time.device_s == pytest.approx(stream_s, rel=0.03)
    assert costs.to_host_bytes_per_token == 2 * 4096 * (1 + 2 / 4)
    assert costs.to_device_bytes_per_token == 2 * 4096
    assert costs.kv_bytes_per_token == 4096


def test_measured_times_of_another_model_are_not_used():
    model = catalogue.model("mixtral-8x7b")
    measured = replace(
        catalogue.hardware("a40-xeon8380").with_values(
            "measured", "test", device_time_fixed_s=0.5, device_time_per_token_s=1.0
        ),
        profiled_model="mixtral-8x7b",
    )
    assert IterationCosts.from_specs(model, measured).device_time.at(2) == pytest.approx(2.5)
    curve = Curve(((1.0, 0.5), (4.0, 0.75)), "measured")
    bent = replace(measured, device_time_curve=curve)
    assert IterationCosts.from_specs(model, bent).device_time.at(4) == 0.75
    other = replace(bent, profiled_model="dbrx")
    assert IterationCosts.from_specs(model, other).device_time.at(2) < 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layers", 0),
        ("n_groups", 3),
        ("link_slowdown", 1.0),
        ("resident_share", 1.5),
    ],
)
def test_terms_that_make_no_sense_name_their_field(field, value):
    with pytest.raises(InvalidInputError, match=field):
        replace(COSTS, **{field: value})


def test_points_must_ascend():
    with pytest.raises(InvalidInputError, match="points"):
        PiecewiseLine(((1.0, 2.0), (1.0, 3.0)))
