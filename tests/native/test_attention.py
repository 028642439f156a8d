"""The attention kernels against float64, for every instruction set of the machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from native import attention
from native.attention import AttentionShape, lib
from native.errors import InvalidArgumentError
from tests.native.reference import (
    ERROR_LIMITS,
    LSE_LIMITS,
    Case,
    make_case,
    reference_attention,
    relative_error,
)

DTYPES = ("fp32", "bf16", "int8")
CONTEXTS = (1, 2, 15, 16, 17, 31, 33, 100, 511, 512, 1000, 5000)


def check_against_float64(case: Case) -> None:
    out, lse = case.attend()
    expected_out, expected_lse = case.expected()
    assert relative_error(out, expected_out) < ERROR_LIMITS[case.shape.kv_dtype]
    assert np.abs(lse - expected_lse).max() < LSE_LIMITS[case.shape.kv_dtype]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_decode_equals_float64_at_every_length(each_isa: str, context: int, kv_dtype: str) -> None:
    check_against_float64(make_case(AttentionShape(8, 2, 128, kv_dtype), context, 1, context))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("ratio", range(1, 17))
def test_any_ratio_of_query_to_kv_heads(each_isa: str, ratio: int, kv_dtype: str) -> None:
    check_against_float64(make_case(AttentionShape(3 * ratio, 3, 64, kv_dtype), 77, 1, ratio))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_any_head_size(each_isa: str, head_dim: int, kv_dtype: str) -> None:
    for heads in ((2, 2), (8, 2), (14, 2)):
        check_against_float64(make_case(AttentionShape(*heads, head_dim, kv_dtype), 45, 1, 1))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize(("context", "n_queries"), [(5, 5), (49, 33), (300, 300), (1000, 47)])
def test_prefill_chunk_is_causal(
    each_isa: str, context: int, n_queries: int, kv_dtype: str
) -> None:
    check_against_float64(make_case(AttentionShape(8, 2, 64, kv_dtype), context, n_queries, 3))


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_large_scores_do_not_overflow(each_isa: str, kv_dtype: str) -> None:
    """Scores of several hundred, which exp alone could not represent."""
    case = make_case(AttentionShape(4, 1, 64, kv_dtype), 200, 3, 5, spread=200.0)
    out, lse = case.attend()
    expected_out, expected_lse = case.expected()
    assert np.abs(expected_lse).max() > 300
    # An FP32 score of 300 is known to 3e-5, and so are the weights.
    assert relative_error(out, expected_out) < max(2e-4, ERROR_LIMITS[kv_dtype])
    assert np.allclose(lse, expected_lse, rtol=1e-2 if kv_dtype == "int8" else 1e-5)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_shapes_equal_float64(each_isa: str, data: st.DataObject) -> None:
    n_kv_heads = data.draw(st.integers(1, 5))
    ratio = data.draw(st.integers(1, 16))
    head_dim = 16 * data.draw(st.integers(1, 16))
    context = data.draw(st.integers(1, 200))
    n_queries = data.draw(st.integers(1, min(context, 40)))
    shape = AttentionShape(
        n_kv_heads * ratio, n_kv_heads, head_dim, data.draw(st.sampled_from(DTYPES))
    )
    check_against_float64(make_case(shape, context, n_queries, data.draw(st.integers(0, 9999))))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("heads", [(8, 2), (6, 6), (22, 2)])
def test_a_row_does_not_depend_on_its_company(
    each_isa: str, heads: tuple[int, int], kv_dtype: str
) -> None:
    """Prefill rows equal decode rows to the bit, however the chunk is cut."""
    case = make_case(AttentionShape(*heads, 80, kv_dtype), 130, 100, 11)
    whole_out, whole_lse = case.attend()
    for size in (1, 3, 64):
        for first in range(0, 100, size):
            seen = case.query_position + min(first + size, 100)
            out, lse = case.attend(first, size, kv_range=(0, seen))
            np.testing.assert_array_equal(out, whole_out[first : first + size])
            np.testing.assert_array_equal(lse, whole_lse[first : first + size])


def test_rows_that_see_nothing_give_zero_and_minus_infinity(each_isa: str) -> None:
    case = make_case(AttentionShape(4, 2, 32, "bf16"), 64, 40, 2)  # positions 24 … 63
    out, lse = case.attend(kv_range=(32, 64))
    assert (out[:8] == 0).all()
    assert (lse[:8] == -np.inf).all()
    assert np.isfinite(lse[8:]).all()
    assert (np.abs(out[8:]).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("split", [16, 48, 512])
def test_merged_ranges_equal_one_range(each_isa: str, split: int, kv_dtype: str) -> None:
    case = make_case(AttentionShape(8, 2, 64, kv_dtype), 700, 9, 21)
    parts = [case.attend(kv_range=(at, min(at + split, 700))) for at in range(0, 700, split)]
    outs = np.stack([out.reshape(-1, 64) for out, _ in parts])
    lses = np.stack([lse.reshape(-1) for _, lse in parts])
    out, lse = attention.merge(outs, lses)
    expected_out, expected_lse = case.expected()
    assert relative_error(out.reshape(expected_out.shape), expected_out) < ERROR_LIMITS[kv_dtype]
    assert np.abs(lse.reshape(expected_lse.shape) - expected_lse).max() < LSE_LIMITS[kv_dtype]


def test_strided_queries(each_isa: str) -> None:
    """q, k and v may be slices of one fused projection."""
    shape = AttentionShape(4, 2, 32, "fp32")
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((20, 8, 32), dtype=np.float32)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    arena = attention.new_arena(shape, 2, fill=0xFF)
    table = np.array([1, 0], np.int32)
    attention.store(shape, arena, table, 0, k, v)
    out, _ = attention.attend(shape, arena, table, q, 0, (0, 20), 0.2)
    case = Case(shape, arena, table, q, k, v, 0.2)
    assert relative_error(out, case.expected()[0]) < ERROR_LIMITS["fp32"]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_block_forgets_its_former_owner(each_isa: str, kv_dtype: str) -> None:
    """What another sequence left in a block (here NaN) must not reach this one's result."""
    shape = AttentionShape(2, 1, 32, kv_dtype)
    case = make_case(shape, 16, 1, 1)
    nan = np.full_like(case.k, np.nan if kv_dtype == "fp32" else 0x7FC0)
    attention.store(shape, case.arena, case.table, 0, nan, nan)
    attention.store(shape, case.arena, case.table, 0, case.k[:5], case.v[:5])
    out, _ = attention.attend(shape, case.arena, case.table, case.q, 4, (0, 5), case.scale)
    short = Case(shape, case.arena, case.table, case.q, case.k[:5], case.v[:5], case.scale)
    assert relative_error(out, short.expected()[0]) < ERROR_LIMITS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("context", [1, 16, 17, 40, 64])
@pytest.mark.parametrize("heads", [(8, 2), (640, 2)])  # the latter walks head by head
def test_a_token_stored_on_the_way_equals_one_stored_before(
    each_isa: str, heads: tuple[int, int], context: int, kv_dtype: str
) -> None:
    case = make_case(AttentionShape(*heads, 32, kv_dtype), context, 1, 4)
    arena = attention.new_arena(case.shape, len(case.arena), fill=0xFF)
    attention.store(case.shape, arena, case.table, 0, case.k[:-1], case.v[:-1])
    last = (case.k[-1:], case.v[-1:])
    found = attention.attend(
        case.shape, arena, case.table, case.q, context - 1, (0, context), case.scale, last
    )
    np.testing.assert_array_equal(arena[case.table], case.arena[case.table])
    for one, other in zip(found, case.attend(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_storing_token_by_token_equals_storing_at_once() -> None:
    for kv_dtype in DTYPES:
        case = make_case(AttentionShape(2, 2, 48, kv_dtype), 75, 1, 8)
        arena = attention.new_arena(case.shape, len(case.arena), fill=0xFF)
        for first, count in ((0, 1), (1, 14), (15, 1), (16, 16), (32, 40), (72, 3)):
            k, v = case.k[first : first + count], case.v[first : first + count]
            attention.store(case.shape, arena, case.table, first, k, v)
        np.testing.assert_array_equal(arena[case.table], case.arena[case.table])


@dataclass
class Int8Case:
    """The case's KV as an INT8 cache holds it, read back from the arena."""

    case: Case

    def head(self, tile: NDArray[np.uint8], is_k: bool) -> NDArray[np.float64]:
        """(16 tokens, head_dim) of one head's K or V and its factors."""
        dim = self.case.shape.head_dim
        factors = tile[16 * dim :].view(np.float32).astype(np.float64)
        if is_k:
            biased = tile[: 16 * dim].reshape(dim // 4, 16, 4).transpose(1, 0, 2)
            values = biased.reshape(16, dim).astype(np.float64) - 128
        else:
            quads = tile[: 16 * dim].view(np.int8).reshape(dim // 16, 4, 16, 4)
            values = quads.transpose(1, 3, 0, 2).reshape(16, dim).astype(np.float64)
        return values * factors[:, None]

    def kv(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        case, half = self.case, 16 * self.case.shape.head_dim + 64
        blocks = case.arena[case.table].reshape(-1, case.shape.n_kv_heads, 2, half)
        k, v = (
            np.stack([[self.head(h[i], i == 0) for h in block] for block in blocks])
            .transpose(0, 2, 1, 3)
            .reshape(-1, case.shape.n_kv_heads, case.shape.head_dim)[: case.context]
            for i in (0, 1)
        )
        return k, v


def test_int8_values_are_known_to_half_a_step() -> None:
    case = make_case(AttentionShape(4, 2, 48, "int8"), 35, 1, 3)
    for held, stored in zip(Int8Case(case).kv(), (case.k, case.v), strict=True):
        exact = attention.from_bf16(stored).astype(np.float64)
        step = np.abs(exact).max(axis=2, keepdims=True) / 127
        assert (np.abs(held - exact) <= 0.5001 * step).all()
        assert np.abs(held - exact).max() > 0.3 * step.min()


@pytest.mark.parametrize("with_dot_products", [True, False])
def test_int8_attention_is_exact_over_the_held_values(
    each_isa: str, with_dot_products: bool
) -> None:
    """To FP32 rounding where INT8 is widened; dot products also round queries and weights."""
    case = make_case(AttentionShape(12, 3, 80, "int8"), 333, 20, 9)
    k, v = Int8Case(case).kv()
    lib.ml_cpu_allow_vnni(with_dot_products)
    try:
        out, lse = case.attend()
        rounds = lib.ml_cpu_has_vnni() and each_isa.startswith("avx512")
    finally:
        lib.ml_cpu_allow_vnni(True)
    q = case.as_float(case.q)
    expected_out, expected_lse = reference_attention(q, k, v, case.query_position, case.scale)
    assert relative_error(out, expected_out) < (1e-2 if rounds else 2e-6)
    assert np.abs(lse - expected_lse).max() < (2e-2 if rounds else 1e-5)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_stays_nan(each_isa: str, name: str, kv_dtype: str) -> None:
    """A broken model shows; it does not turn into plausible numbers."""
    case = make_case(AttentionShape(2, 1, 32, kv_dtype), 20, 1, 1)
    getattr(case, name)[-1, 0, 3] = np.nan if kv_dtype == "fp32" else 0x7FC0
    attention.store(case.shape, case.arena, case.table, 0, case.k, case.v)
    assert np.isnan(case.attend()[0][:, 0]).any()


class TestRefusals:
    """Every wrong argument is refused by name before the C code runs."""

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ((4, 2, 24, "bf16"), "head_dim"),
            ((4, 2, 272, "bf16"), "head_dim"),
            ((4, 3, 32, "bf16"), "n_q_heads"),
            ((4, 0, 32, "bf16"), "n_kv_heads"),
            ((4, 2, 32, "fp16"), "kv_dtype"),
        ],
    )
    def test_shape(self, arguments: tuple[int, int, int, str], field: str) -> None:
        with pytest.raises(InvalidArgumentError, match=field):
            AttentionShape(*arguments)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"kv_range": (8, 20)}, "kv_range"),
            ({"kv_range": (16, 10)}, "kv_range"),
            ({"kv_range": (0, 33)}, "block_table"),
        ],
    )
    def test_range(self, change: dict[str, tuple[int, int]], field: str) -> None:
        with pytest.raises(InvalidArgumentError, match=field):
            make_case(AttentionShape(4, 2, 32, "bf16"), 20, 1, 0).attend(**change)

    def test_block_number_beyond_the_arena(self) -> None:
        case = make_case(AttentionShape(4, 2, 32, "bf16"), 20, 1, 0)
        case.table[0] = len(case.arena)
        with pytest.raises(InvalidArgumentError, match="block_table"):
            case.attend()

    def test_query_dtype(self) -> None:
        case = make_case(AttentionShape(4, 2, 32, "bf16"), 20, 1, 0)
        case.q = attention.from_bf16(case.q)
        with pytest.raises(InvalidArgumentError, match="q: must be uint16"):
            case.attend()
