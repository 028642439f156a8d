"""Stage 1 against the paper's figures and the laws that it must obey."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.errors import InvalidInputError
from planner.stage1 import (
    SaturationRow,
    cpu_attention_flops_per_second_needed,
    gemm_intensity,
    gpu_tokens_per_second,
    host_bytes_per_second_needed,
    overlapped_kv_gain,
    parallelism_memory_efficiency,
    saturation_row,
    saturation_tokens,
    stage1,
    stream_seconds,
)

laws = settings(max_examples=300, deadline=None)
lengths = st.integers(1, 4000)
capacities = st.integers(8_000, 10**7)
durations = st.floats(1e-3, 100)
rates = st.floats(1, 1e6)


@pytest.mark.parametrize(
    ("gpu_teraflops", "row"),
    [
        (150, SaturationRow(19.2, 614, 1228)),  # A40
        (181, SaturationRow(23.2, 741, 1482)),  # L40
        (312, SaturationRow(40.0, 1277, 2554)),  # A100
    ],
)
def test_table_2_of_the_paper_to_its_printed_digits(gpu_teraflops, row):
    assert saturation_row(gpu_teraflops) == row


def test_pme_of_the_paper():
    assert parallelism_memory_efficiency(98, 32) == pytest.approx(0.0356, abs=5e-5)


# Mixtral-8x7B on the paper's testbed, 16-token blocks (paper.md, "Anchors for tests").
ANCHORS = [
    (70e9, 98, 32, 3783),
    (70e9, 98, 128, 1207),
    (70e9, 926, 128, 921),
    (70e9, 128, 512, 361),
    (210e9, 98, 64, 3783),
    (210e9, 98, 256, 2034),
]


@pytest.mark.parametrize(("kv_bytes", "prompt", "generate", "expected_per_s"), ANCHORS)
def test_anchors_of_the_testbed(kv_bytes, prompt, generate, expected_per_s):
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    stream_s = stream_seconds(
        model.streamed_bytes_per_pass, machine.require("link_h2d_bytes_per_s")
    )
    gpu_rate = gpu_tokens_per_second(
        machine.require("gpu_sustained_flops_per_s"), model.active_parameters
    )
    bound = stage1(prompt, generate, model.kv_capacity_tokens(kv_bytes), stream_s, gpu_rate)
    assert stream_s == pytest.approx(4.82, rel=0.03)
    assert bound.tokens_per_s == pytest.approx(expected_per_s, rel=0.03)


def test_host_bandwidth_of_the_papers_example():
    """KV of twice the weights at 20 GB/s of link needs 40 + 20 = 60 GB/s."""
    weights_bytes = 94e9
    stream_s = stream_seconds(weights_bytes, 20e9)
    assert host_bytes_per_second_needed(2 * weights_bytes, stream_s, 20e9) == pytest.approx(60e9)
    # s = 4 query heads per KV head: 4 FLOP per BF16 byte.
    assert cpu_attention_flops_per_second_needed(2 * weights_bytes, stream_s, 4) == pytest.approx(
        160e9
    )


def test_overlap_gain_of_the_paper():
    assert overlapped_kv_gain(98, 256) == pytest.approx(1.57, abs=0.005)


def test_intensity_as_printed_and_its_approximation():
    # m = 14336 / 4096, two of eight experts, s = 4
    assert gemm_intensity(1, 8, 2, 3.5, 4) == pytest.approx(44.5 / 170.5)
    assert gemm_intensity(1000, 64, 8, 50, 4) == pytest.approx(1000 * 8 / 64, rel=0.01)


@laws
@given(lengths, lengths, capacities, durations, rates)
def test_bound_is_the_least_of_its_parts_and_named(prompt, generate, capacity, stream_s, gpu):
    bound = stage1(prompt, generate, capacity, stream_s, gpu)
    assert bound.tokens_per_s == min(bound.kv_tokens_per_s, bound.gpu_tokens_per_s)
    assert bound.limit == ("gpu" if gpu < bound.kv_tokens_per_s else "kv_capacity")
    share = generate / (prompt + generate)
    assert bound.generated_tokens_per_s == pytest.approx(bound.tokens_per_s * share)


@laws
@given(lengths, lengths, capacities, durations, st.floats(0.1, 10))
def test_kv_bound_scales_with_memory_and_with_the_link(
    prompt, generate, capacity, stream_s, factor
):
    base = stage1(prompt, generate, capacity, stream_s, None).tokens_per_s
    slower = stage1(prompt, generate, capacity, factor * stream_s, None).tokens_per_s
    assert slower == pytest.approx(base / factor)
    twice = stage1(prompt, generate, 2 * capacity, stream_s, None).tokens_per_s
    assert twice == pytest.approx(2 * base)


@laws
@given(lengths, lengths)
def test_pme_falls_with_every_token_more_generated(prompt, generate):
    pme = parallelism_memory_efficiency(prompt, generate)
    assert 0 < parallelism_memory_efficiency(prompt, generate + 1) < pme
    assert pme * generate <= 2  # (p+g) / (p+g/2) is at most 2


@laws
@given(lengths, lengths)
def test_pme_counts_each_pass_of_a_sequence(prompt, generate):
    """Eq 3 against the sum it stands for, whose convention differs by g/2 tokens."""
    held = sum(prompt + j for j in range(1, generate + 1)) - generate / 2
    assert parallelism_memory_efficiency(prompt, generate) == pytest.approx(
        (prompt + generate) / held
    )


@laws
@given(lengths, lengths)
def test_overlap_gain_lies_between_one_and_two(prompt, generate):
    assert 1 < overlapped_kv_gain(prompt, generate) < 2


@laws
@given(st.floats(1e12, 1e15), st.floats(1e9, 1e11), st.integers(1, 16), st.integers(1, 16))
def test_saturation_scales_with_compute_link_and_sparsity(flops, link, ratio, per_token):
    tokens = saturation_tokens(flops, link, ratio * per_token, per_token)
    assert tokens == pytest.approx(flops / link * ratio)
    assert saturation_tokens(flops, 2 * link, ratio * per_token, per_token) == pytest.approx(
        tokens / 2
    )


@laws
@given(
    st.integers(1, 10**5),
    st.integers(1, 64),
    st.integers(1, 8),
    st.floats(0.1, 8),
    st.integers(1, 16),
)
def test_intensity_is_linear_in_tokens_and_between_sparse_and_dense(
    tokens, ratio, per_token, width, heads
):
    experts = ratio * per_token
    intensity = gemm_intensity(tokens, experts, per_token, width, heads)
    assert intensity == pytest.approx(tokens * gemm_intensity(1, experts, per_token, width, heads))
    assert tokens / ratio <= intensity * (1 + 1e-9) and intensity <= tokens * (1 + 1e-9)


def test_without_streaming_only_the_device_bounds():
    bound = stage1(98, 32, 10_000, 0.0, 500.0)
    assert (bound.tokens_per_s, bound.limit, bound.kv_tokens_per_s) == (500.0, "gpu", None)
    with pytest.raises(InvalidInputError, match="gpu_tokens_per_s"):
        stage1(98, 32, 10_000, 0.0, None)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("prompt", (0, 32, 1000)),
        ("generate", (98, 0.5, 1000)),
        ("prompt", (float("nan"), 32, 1000)),
        ("kv", (98, 32, 129)),
        ("kv", (98, 32, float("nan"))),
    ],
)
def test_wrong_input_names_its_field(field, arguments):
    with pytest.raises(InvalidInputError) as error:
        stage1(*arguments, 1.0, None)
    assert error.value.field == field
