"""Estimates: the anchors of the paper's testbed, memory, notes, and the cases that cannot run."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.case import AUTO, make_case
from planner.errors import InvalidInputError
from planner.estimate import Detail, estimate
from planner.hardware import HardwareSpec
from planner.inputs import CaseInputs
from planner.steady import steady
from planner.workload import Lengths, Workload

MIXTRAL = catalogue.model("mixtral-8x7b")
TESTBED = catalogue.hardware("a40-xeon8380")


def case(kv_gb=70, p=98, g=32, requests=25_000, hardware=TESTBED, model=MIXTRAL, **more):
    workload = Workload.uniform(p, g, requests)
    return make_case(model, hardware, workload, kv_bytes=kv_gb * 1e9, **more)


# KV in GB, p, g, K; Stage 1, Stage 2, Stage 2 generated (tokens/s): derived anchors.
@pytest.mark.parametrize(
    ("kv", "p", "g", "k", "bound", "batch", "generated"),
    [
        (70, 98, 32, 25_000, 3783, 3139, 773),
        (70, 98, 128, 20_000, 1207, 994, 563),
        (70, 926, 128, 20_000, 921, 890, 108),
        (70, 128, 512, 20_000, 361, 331, 265),
        (210, 98, 64, 20_000, 3783, 2781, 1099),
        (210, 98, 256, 20_000, 2034, 1463, 1058),
    ],
)
def test_the_testbeds_anchors_hold_within_3_percent(kv, p, g, k, bound, batch, generated):
    found = estimate(case(kv, p, g, k), Detail.NONE)
    assert found.stage1.tokens_per_s == pytest.approx(bound, rel=0.03)
    assert found.stage2.tokens_per_s == pytest.approx(batch, rel=0.03)
    assert found.stage2.generated_tokens_per_s == pytest.approx(generated, rel=0.03)


def test_the_testbeds_n_real_is_the_published_one():
    assert case().step_tokens == pytest.approx(18_236, rel=0.02)


def test_preemption_is_common_in_70_gb_and_rare_in_210_gb():
    tight = estimate(case(70, 98, 64, 20_000)).simulation
    ample = estimate(case(210, 98, 64, 20_000)).simulation
    assert 0.30 < tight.preemption_share < 0.55
    assert ample.preemption_share < 0.02


@pytest.mark.parametrize(("kv", "g", "requests"), [(70, 64, 4000), (210, 32, 4000), (30, 32, 2000)])
def test_a_scaled_simulation_is_close_to_the_full_one(kv, g, requests):
    full = estimate(case(kv, 98, g, requests), Detail.FULL).simulation
    scaled = estimate(case(kv, 98, g, requests), Detail.SCALED).simulation
    assert full.scale == 1
    assert scaled.tokens_per_s == pytest.approx(full.tokens_per_s, rel=0.02)
    assert scaled.preemption_share == pytest.approx(full.preemption_share, abs=0.05)
    assert scaled.mean_kv_use_share == pytest.approx(full.mean_kv_use_share, abs=0.03)


def test_a_large_batch_is_scaled_down():
    found = estimate(case()).simulation
    assert found.scale > 5
    assert found.requests_simulated == pytest.approx(25_000 / found.scale, rel=0.01)
    assert sum(found.share_by_limit.values()) == pytest.approx(1)


def test_a_trace_is_simulated_with_its_own_lengths():
    lengths = [Lengths(50, 10), Lengths(200, 40)] * 100
    found = estimate(
        make_case(MIXTRAL, TESTBED, Workload.from_lengths(lengths), kv_bytes=20e9), Detail.FULL
    )
    tokens = found.simulation.tokens_per_s * found.simulation.total_s
    assert tokens == pytest.approx(sum(map(sum, lengths)))
    assert found.workload.prompt_tokens == 125


@settings(max_examples=300, deadline=None)
@given(
    kv=st.floats(5, 2000),
    more=st.floats(1.01, 5),
    p=st.integers(1, 2000),
    g=st.integers(1, 1000),
    requests=st.integers(1, 100_000),
)
def test_more_kv_never_slows_the_steady_rate_down_and_never_beats_stage_2(kv, more, p, g, requests):
    few, many = case(kv, p, g, requests), case(kv * more, p, g, requests)
    slower, faster = steady(few), steady(many)
    assert faster.tokens_per_s >= slower.tokens_per_s * 0.998
    batch = estimate(few, Detail.NONE).stage2
    assert slower.tokens_per_s <= batch.tokens_per_s * (1 + 1e-9)


def test_slow_host_memory_limits_the_steady_rate():
    slow = TESTBED.with_values(
        "assumed", "", host_read_bytes_per_s=20e9, attention_bytes_per_s=10e9
    )
    found = estimate(case(70, 98, 128, hardware=slow), Detail.NONE)
    assert found.steady.limit in ("attention", "host_memory")
    assert found.host_needs.read_enough is False
    assert found.steady.tokens_per_s < 0.8 * found.stage2.tokens_per_s


def test_the_kv_pool_fills_what_host_memory_has_left():
    workload = Workload.uniform(98, 32, 1000)
    found = estimate(make_case(MIXTRAL, TESTBED, workload), Detail.NONE)
    assert found.memory.host.free_bytes == pytest.approx(0, abs=1)
    assert found.memory.host.used_bytes == pytest.approx(512e9)


def test_resident_layers_shorten_the_pass():
    none = estimate(case(), Detail.NONE)
    some = estimate(case(resident=AUTO), Detail.NONE)
    assert some.memory.resident_layers == 2
    assert some.stage1.stream_s == pytest.approx(none.stage1.stream_s * 30 / 32)
    assert some.memory.gpu.fits
    assert none.residency.layers == 2
    assert none.residency.stage2_tokens_per_s == pytest.approx(some.stage2.tokens_per_s)
    assert some.residency is None


def test_a_gpu_too_small_for_the_buffer_is_noted():
    small = TESTBED.with_values("assumed", "", gpu_memory_bytes=4e9)
    found = estimate(case(hardware=small), Detail.NONE)
    assert found.memory.gpu.fits is False
    assert any("GPU memory is short of" in note for note in found.notes)


def test_gpu_memory_caps_the_tokens_of_a_pass():
    tight = TESTBED.with_values("assumed", "", gpu_memory_bytes=7.8e9)
    capped = case(hardware=tight)
    assert capped.step_tokens < case().step_tokens / 2
    assert estimate(capped, Detail.NONE).stage1.tokens_per_s < 0.6 * 3783


def test_a_measured_device_time_of_this_model_is_used():
    timed = replace(
        TESTBED.with_values("measured", "", device_time_fixed_s=1e-3, device_time_per_token_s=2e-5),
        profiled_model="mixtral-8x7b",
    )
    found = estimate(case(hardware=timed), Detail.NONE)
    assert found.stage1.gpu_tokens_per_s == pytest.approx(1 / (32 * 2e-5))
    other = estimate(case(hardware=replace(timed, profiled_model="dbrx")), Detail.NONE)
    assert other.stage1.gpu_tokens_per_s == pytest.approx(3789, rel=0.01)
    assert any("measured with dbrx" in note for note in other.notes)


def test_without_a_link_there_is_no_stage_2_and_the_device_limits():
    cpu = HardwareSpec("laptop", device="cpu").with_values(
        "measured",
        "",
        device_time_fixed_s=1e-3,
        device_time_per_token_s=1e-3,
        attention_bytes_per_s=1e10,
        host_memory_bytes=200e9,
    )
    found = estimate(case(2, 98, 32, 50, hardware=cpu))
    assert found.stage2 is None
    assert found.host_needs is None
    assert found.stage1.limit == "gpu"
    assert found.simulation.limit == "device"


def test_a_machine_without_any_rate_is_refused():
    with pytest.raises(InvalidInputError, match="gpu_sustained_flops_per_s"):
        case(hardware=HardwareSpec("bare"))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"kv_gb": 0.01}, "kv"),
        ({"p": 32_000, "g": 1000}, "generate"),
        ({"block_tokens": 0}, "block"),
        ({"resident": "all"}, "resident"),
        ({"resident": -1.0}, "resident"),
    ],
)
def test_what_can_never_run_is_named(arguments, field):
    with pytest.raises(InvalidInputError) as raised:
        case(**arguments)
    assert raised.value.field == field


def test_weights_beyond_host_memory_are_refused_with_both_sizes():
    with pytest.raises(InvalidInputError, match=r"64\.0 GB .*93\.4 GB"):
        CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "32", ram="64GB").case()


@pytest.mark.parametrize("name", catalogue.model_names())
def test_every_model_of_the_catalogue_can_be_estimated(name):
    found = estimate(
        CaseInputs(name, "h200-server", "512", "128", "2000", kv="300GB").case(), Detail.NONE
    )
    assert 0 < found.steady.tokens_per_s <= found.stage1.tokens_per_s


@pytest.mark.parametrize("name", catalogue.hardware_names())
def test_every_machine_of_the_catalogue_can_be_estimated(name):
    inputs = CaseInputs("olmoe-1b-7b", name, "128", "64", "2000", kv="20GB")
    assert estimate(inputs.case(), Detail.NONE).steady.tokens_per_s > 0


def test_json_is_plain_and_complete():
    import json

    data = json.loads(json.dumps(estimate(case(requests=500)).to_json(), allow_nan=False))
    assert data["schema"] == "moe-lens/estimate/1"
    for path in (
        "stage1.tokens_per_s",
        "stage1.limit",
        "stage2.tokens_per_s",
        "stage2.generated_tokens_per_s",
        "simulation.tokens_per_s",
        "simulation.preemption_share",
        "memory.weights_bytes",
        "memory.kv_bytes_per_token",
        "memory.host.used_bytes",
    ):
        value = data
        for key in path.split("."):
            value = value[key]
        assert value is not None
