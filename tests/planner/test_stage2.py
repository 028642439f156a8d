"""Stage 2 against its anchors and the laws that it must obey."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.errors import InvalidInputError
from planner.stage1 import gpu_tokens_per_second, stage1, stream_seconds
from planner.stage2 import (
    batch_tokens_per_s,
    kv_prompts_per_step,
    requests_for_share,
    sequence_kv_token_steps,
    stage2,
)
from planner.units import div_ceil

laws = settings(max_examples=300, deadline=None)
prompts = st.integers(1, 2000)
generates = st.integers(1, 600)
blocks = st.sampled_from([1, 8, 16, 32, 64])
batches = st.integers(1, 10**6)
capacities = st.integers(4_000, 10**7)
durations = st.floats(1e-3, 100)
gpu_rates = st.none() | st.floats(1, 1e6)


@pytest.mark.parametrize(
    ("kv_bytes", "prompt", "generate", "requests", "total_per_s", "generated_per_s"),
    [
        (70e9, 98, 32, 25_000, 3139, 773),
        (70e9, 98, 128, 20_000, 994, 563),
        (70e9, 926, 128, 20_000, 890, 108),
        (70e9, 128, 512, 20_000, 331, 265),
        (210e9, 98, 64, 20_000, 2781, 1099),
        (210e9, 98, 256, 20_000, 1463, 1058),
    ],
)
def test_anchors_of_the_testbed(kv_bytes, prompt, generate, requests, total_per_s, generated_per_s):
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    stream_s = stream_seconds(
        model.streamed_bytes_per_pass, machine.require("link_h2d_bytes_per_s")
    )
    gpu_rate = gpu_tokens_per_second(
        machine.require("gpu_sustained_flops_per_s"), model.active_parameters
    )
    capacity = model.kv_capacity_tokens(kv_bytes)
    batch = stage2(prompt, generate, requests, capacity, 16, stream_s, gpu_rate)
    assert batch.tokens_per_s == pytest.approx(total_per_s, rel=0.03)
    assert batch.generated_tokens_per_s == pytest.approx(generated_per_s, rel=0.03)


@laws
@given(prompts, generates, blocks)
def test_kv_of_a_sequence_is_the_sum_over_its_passes(prompt, generate, block):
    expected = sum(div_ceil(prompt + j, block) * block for j in range(1, generate + 1))
    assert sequence_kv_token_steps(prompt, generate, block) == expected


@laws
@given(prompts, generates, batches, capacities, blocks, durations, gpu_rates)
def test_never_above_stage_1(prompt, generate, requests, capacity, block, stream_s, gpu):
    batch = stage2(prompt, generate, requests, capacity, block, stream_s, gpu)
    bound = stage1(prompt, generate, capacity, stream_s, gpu)
    assert batch.tokens_per_s <= bound.tokens_per_s * (1 + 1e-9)


@laws
@given(prompts, generates, capacities, durations, gpu_rates)
def test_a_large_batch_in_small_blocks_converges_to_stage_1(
    prompt, generate, capacity, stream_s, gpu
):
    assume(2 * prompt + generate >= 200)  # Eq 3's sum leaves out half a token for each pass
    q = kv_prompts_per_step(prompt, generate, capacity, 1)
    assume(q * generate * 1000 >= 1)
    requests = int(1000 * q * generate) + 1
    batch = stage2(prompt, generate, requests, capacity, 1, stream_s, gpu)
    bound = stage1(prompt, generate, capacity, stream_s, gpu)
    assert batch.tokens_per_s == pytest.approx(bound.tokens_per_s, rel=0.01)


@laws
@given(prompts, generates, batches, capacities, blocks, durations)
def test_twice_the_streaming_time_is_half_the_throughput(
    prompt, generate, requests, capacity, block, stream_s
):
    once = stage2(prompt, generate, requests, capacity, block, stream_s, None)
    twice = stage2(prompt, generate, requests, capacity, block, 2 * stream_s, None)
    assert twice.io_tokens_per_s == pytest.approx(once.io_tokens_per_s / 2)


@laws
@given(generates, st.floats(0.1, 1000), prompts)
def test_95_percent_of_the_limit_needs_19_times_the_running_requests(generate, q, prompt):
    requests = requests_for_share(0.95, q, generate)
    assert requests == pytest.approx(19 * q * generate)
    limit = q * (prompt + generate)
    assert batch_tokens_per_s(prompt, generate, requests, q, 1.0) == pytest.approx(0.95 * limit)


@laws
@given(prompts, generates, batches, capacities, blocks, durations, gpu_rates)
def test_more_of_anything_helps(prompt, generate, requests, capacity, block, stream_s, gpu):
    def rate(requests=requests, capacity=capacity, block=block, gpu=gpu):
        return stage2(prompt, generate, requests, capacity, block, stream_s, gpu).tokens_per_s * (
            1 + 1e-9
        )

    base = rate() / (1 + 1e-9)
    assert rate(requests=requests + 1) >= base
    assert rate(capacity=2 * capacity) >= base
    assert rate(block=1) >= base
    assert rate(gpu=None) >= base


@laws
@given(prompts, generates, batches, capacities, blocks, durations, gpu_rates)
def test_figures_of_a_result_agree(prompt, generate, requests, capacity, block, stream_s, gpu):
    batch = stage2(prompt, generate, requests, capacity, block, stream_s, gpu)
    tokens = requests * (prompt + generate)
    assert batch.tokens_per_s * batch.total_s == pytest.approx(tokens)
    assert batch.total_s == pytest.approx(batch.steps * stream_s)
    assert batch.steady_tokens_per_step == batch.prompts_per_step * (prompt + generate)
    assert batch.tokens_per_s == min(batch.io_tokens_per_s, batch.gpu_tokens_per_s or float("inf"))
    if batch.limit == "gpu":
        assert batch.steady_tokens_per_step == pytest.approx(gpu * stream_s)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("prompt", {"prompt_tokens": 0}),
        ("generate", {"generated_tokens": 0}),
        ("requests", {"requests": 0}),
        ("block", {"block_tokens": 0}),
        ("kv", {"kv_capacity_tokens": 143}),  # nine blocks of 16 hold 130 tokens
        ("stream_s", {"stream_s": 0.0}),
        ("stream_s", {"stream_s": float("nan")}),
    ],
)
def test_wrong_input_names_its_field(field, changed):
    arguments = {
        "prompt_tokens": 98,
        "generated_tokens": 32,
        "requests": 100,
        "kv_capacity_tokens": 144,
        "block_tokens": 16,
        "stream_s": 1.0,
        "gpu_tokens_per_s": None,
    }
    stage2(**arguments)
    with pytest.raises(InvalidInputError) as error:
        stage2(**{**arguments, **changed})
    assert error.value.field == field


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_share_of_the_limit_lies_between_nothing_and_all(share):
    with pytest.raises(InvalidInputError, match="share"):
        requests_for_share(share, 1.0, 32)
