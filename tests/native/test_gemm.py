"""Packed matrix products against float64, under every instruction set of the machine."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native import gemm
from native.errors import InvalidArgumentError
from native.threads import ThreadPool
from tests.native.gemm_support import (
    BF16_TOLERANCE,
    SUM_TOLERANCE,
    packed,
    packed_pair,
    poisoned,
    random,
    relative_error,
    using_isa,
)

ISAS = gemm.supported_isas()
DTYPES = ("fp32", "bf16")
each_isa = pytest.mark.parametrize("isa_name", ISAS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def product(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return a.double() @ weight.double().T


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 200),
    k=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    isa_name=st.sampled_from(ISAS),
)
@settings(max_examples=200, deadline=None)
def test_odd_shapes_match_float64(m: int, n: int, k: int, dtype: str, isa_name: str) -> None:
    a, weight, out = random(m, k, dtype), random(n, k, dtype, 1), poisoned(m, n, "fp32")
    with using_isa(isa_name):
        gemm.linear(a, packed(weight, dtype), out)
    # Against the magnitudes summed: a single output may be near 0 by cancellation.
    magnitudes = product(a.abs(), weight.abs())
    assert ((out - product(a, weight)).abs() <= 1e-6 * magnitudes).all()


@each_isa
@each_dtype
@pytest.mark.parametrize(("m", "n", "k"), [(1, 192, 3000), (130, 70, 5001), (301, 64, 2048)])
def test_blocked_shapes_match_float64(isa_name: str, dtype: str, m: int, n: int, k: int) -> None:
    a, weight, out = random(m, k, dtype), random(n, k, dtype, 1), poisoned(m, n, "fp32")
    with using_isa(isa_name):
        gemm.linear(a, packed(weight, dtype), out)
    assert relative_error(out, product(a, weight)) < SUM_TOLERANCE


@each_isa
@each_dtype
def test_a_row_is_the_same_bits_in_any_batch_place_and_thread_count(
    isa_name: str, dtype: str
) -> None:
    m, n, k = 203, 200, 2501
    a, weight = random(m, k, dtype), packed(random(n, k, dtype, 1), dtype)
    with using_isa(isa_name):
        whole = poisoned(m, n, "fp32")
        with ThreadPool(1) as pool:
            gemm.linear(a, weight, whole, pool=pool)
        for size in (1, 2, 3, 4, 5, 6, 7, 13, 97, 203):
            first = (size * 31) % (m - size + 1)
            part = poisoned(size, n, "fp32")
            with ThreadPool(3) as pool:
                gemm.linear(a[first : first + size], weight, part, pool=pool)
            assert torch.equal(part, whole[first : first + size]), size


@each_isa
def test_bf16_output_is_the_fp32_output_rounded(isa_name: str) -> None:
    a, weight = random(37, 258, "bf16"), packed(random(130, 258, "bf16", 1), "bf16")
    exact, rounded = poisoned(37, 130, "fp32"), poisoned(37, 130, "bf16")
    with using_isa(isa_name):
        gemm.linear(a, weight, exact)
        gemm.linear(a, weight, rounded)
    assert torch.equal(rounded, exact.bfloat16())


@each_isa
@each_dtype
def test_residual_is_added_to_the_rounded_product(isa_name: str, dtype: str) -> None:
    a, weight, residual = random(37, 96, dtype), random(100, 96, dtype, 1), random(37, 100, dtype)
    plain, out = poisoned(37, 100, dtype), residual.clone()
    with using_isa(isa_name):
        gemm.linear(a, packed(weight, dtype), plain)
        gemm.linear(a, packed(weight, dtype), out, residual=out)
    assert torch.equal(out, residual + plain)


@each_isa
@each_dtype
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_a_pair_gives_silu_of_gate_times_up(isa_name: str, dtype: str, n: int) -> None:
    a, gate, up = random(19, 130, dtype), random(n, 130, dtype, 1), random(n, 130, dtype, 2)
    out = poisoned(19, n, dtype)
    with using_isa(isa_name):
        gemm.linear(a, packed_pair(gate, up, dtype), out)
    expected = torch.nn.functional.silu(product(a, gate)) * product(a, up)
    assert relative_error(out, expected) < (
        2 * BF16_TOLERANCE if dtype == "bf16" else SUM_TOLERANCE
    )


@each_isa
@each_dtype
def test_groups_use_their_own_weights_and_gathered_rows(isa_name: str, dtype: str) -> None:
    sizes, n, k = [0, 5, 1, 0, 130, 7, 0], 150, 2100
    weights = [random(n, k, dtype, seed) for seed in range(len(sizes))]
    group = gemm.WeightGroup([packed(weight, dtype) for weight in weights])
    a = random(50, k, dtype)
    m = sum(sizes)
    index = torch.from_numpy(np.random.default_rng(0).integers(0, 50, m).astype(np.int32))
    offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
    out = poisoned(m, n, "fp32")
    with using_isa(isa_name):
        gemm.grouped_linear(a, group, offsets, out, row_index=index)
    gathered = a[index.long()]
    for weight, first, end in zip(weights, offsets, offsets[1:], strict=False):
        if end > first:
            expected = product(gathered[first:end], weight)
            assert relative_error(out[first:end], expected) < SUM_TOLERANCE


@each_dtype
def test_rows_may_lie_apart(dtype: str) -> None:
    a_wide, out_wide = random(9, 200, dtype), poisoned(9, 300, dtype)
    weight = random(65, 64, dtype, 1)
    gemm.linear(a_wide[:, 10:74], packed(weight, dtype), out_wide[:, 100:165])
    dense = poisoned(9, 65, dtype)
    gemm.linear(a_wide[:, 10:74].contiguous(), packed(weight, dtype), dense)
    assert torch.equal(out_wide[:, 100:165], dense)
    assert out_wide[:, :100].isnan().all() and out_wide[:, 165:].isnan().all()


def packed_bytes(weight: gemm.PackedWeight) -> bytes:
    return ctypes.string_at(weight.address, weight.size_bytes)


@each_isa
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 200), max_size=3),
    packed_dtype=st.sampled_from(DTYPES),
    source_dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=50, deadline=None)
def test_packing_in_ranges_gives_the_documented_layout(
    isa_name: str, n: int, k: int, cuts: list[int], packed_dtype: str, source_dtype: str
) -> None:
    source = random(n, k, source_dtype)
    weight = gemm.allocate(n, k, packed_dtype)
    ctypes.memset(weight.address, 0xFF, weight.size_bytes)
    bounds = sorted({0, n, *(cut for cut in cuts if cut < n)})
    with using_isa(isa_name):
        for first, end in itertools.pairwise(bounds):
            gemm.pack(weight, source[first:end], first_row=first)
    assert packed_bytes(weight) == expected_layout(source, packed_dtype)


@each_isa
@pytest.mark.parametrize(("n", "k", "scratch_rows"), [(20, 38, 64), (200, 38, 64), (333, 64, 150)])
@pytest.mark.parametrize("source_dtype", ["fp32", "bf16"])
def test_packing_from_a_file_is_packing(
    isa_name: str, n: int, k: int, scratch_rows: int, source_dtype: str, tmp_path: Path
) -> None:
    source = random(n, k, source_dtype)
    file = tmp_path / "rows"
    file.write_bytes(b"header" + source.view(torch.uint8).numpy().tobytes())
    row_bytes = k * source.itemsize
    scratch = torch.empty(scratch_rows * row_bytes, dtype=torch.uint8)
    weight = gemm.allocate(n, k, "bf16")
    ctypes.memset(weight.address, 0xFF, weight.size_bytes)
    cut = 13
    with file.open("rb") as stream, using_isa(isa_name):
        for first, count in ((0, cut), (cut, n - cut)):
            gemm.pack_file(
                weight,
                stream.fileno(),
                len(b"header") + first * row_bytes,
                count,
                source_dtype,
                scratch,
                first_row=first,
            )
        assert packed_bytes(weight) == expected_layout(source, "bf16")
        with pytest.raises(EOFError, match=f"the file ends within {n} rows from byte 7 on"):
            gemm.pack_file(weight, stream.fileno(), 7, n, source_dtype, scratch)
        with pytest.raises(InvalidArgumentError, match="scratch: must be at least"):
            gemm.pack_file(weight, stream.fileno(), 6, n, source_dtype, scratch[: 63 * row_bytes])
    with pytest.raises(OSError, match="descriptor"):
        gemm.pack_file(weight, stream_closed(file), 6, n, source_dtype, scratch)


def stream_closed(file: Path) -> int:
    """A descriptor that is none any more."""
    with file.open("rb") as stream:
        return stream.fileno()


def expected_layout(source: torch.Tensor, dtype: str) -> bytes:
    """[n / 64][words of k][64] of words, zero where the matrix has ended."""
    per_word = 2 if dtype == "bf16" else 1
    n, k = source.shape
    rounded = source.bfloat16() if dtype == "bf16" else source.float()
    whole = torch.zeros(-(-n // 64) * 64, -(-k // per_word) * per_word, dtype=rounded.dtype)
    whole[:n, :k] = rounded
    panels = whole.view(-1, 64, whole.shape[1] // per_word, per_word).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).numpy().tobytes()


@each_isa
@pytest.mark.parametrize("n", [20, 64, 70, 96])
def test_a_pair_alternates_thirty_two_gate_and_up_columns(isa_name: str, n: int) -> None:
    gate, up = random(n, 38, "bf16", 1), random(n, 38, "bf16", 2)
    with using_isa(isa_name):
        weight = packed_pair(gate, up, "bf16")
    padding = torch.zeros(-n % 32, 38, dtype=torch.bfloat16)
    halves = [torch.cat([x, padding]).view(-1, 32, 38) for x in (gate, up)]
    interleaved = torch.stack(halves, dim=1).view(-1, 38)
    assert packed_bytes(weight) == expected_layout(interleaved, "bf16")


def test_packed_bytes_work_wherever_they_are_copied() -> None:
    a, weight = random(8, 64, "bf16"), packed(random(64, 64, "bf16", 1), "bf16")
    copy = gemm.allocate(64, 64, "bf16")
    ctypes.memmove(copy.address, weight.address, weight.size_bytes)
    before, after = poisoned(8, 64, "fp32"), poisoned(8, 64, "fp32")
    gemm.linear(a, weight, before)
    ctypes.memset(weight.address, 0xFF, weight.size_bytes)
    gemm.linear(a, copy, after)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("n", "k", "dtype", "pair", "size_bytes"),
    [
        (1024, 1024, "bf16", False, 2 << 20),
        (1024, 1024, "fp32", False, 4 << 20),
        (1792, 1024, "bf16", True, 1792 * 1024 * 4),
        (1, 1, "bf16", False, 256),
        (65, 3, "bf16", False, 2 * 2 * 256),
        (33, 3, "fp32", True, 2 * 3 * 256),
    ],
)
def test_packed_size_is_known_beforehand(
    n: int, k: int, dtype: str, pair: bool, size_bytes: int
) -> None:
    assert gemm.packed_size_bytes(n, k, dtype, pair=pair) == size_bytes


def test_numpy_and_torch_arguments_give_the_same() -> None:
    a, weight = random(3, 32, "bf16"), packed(random(64, 32, "bf16", 1), "bf16")
    from_torch = poisoned(3, 64, "fp32")
    from_numpy = np.full((3, 64), np.nan, np.float32)
    gemm.linear(a, weight, from_torch)
    gemm.linear(a.view(torch.uint16).numpy(), weight, from_numpy)
    assert np.array_equal(from_torch.numpy(), from_numpy)


@pytest.mark.parametrize("isa_name", ISAS)
def test_the_environment_chooses_the_instruction_set(isa_name: str) -> None:
    program = "from native import gemm; print(gemm.selected_isa())"
    environment = os.environ | {"MOE_LENS_ISA": isa_name}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == isa_name


def test_no_rows_are_no_work() -> None:
    weight = packed(random(64, 32, "bf16"), "bf16")
    gemm.linear(poisoned(0, 32, "bf16"), weight, poisoned(0, 64, "bf16"))


WEIGHT = packed(random(64, 32, "bf16"), "bf16")
A, OUT = random(3, 32, "bf16"), poisoned(3, 64, "bf16")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"a": A.float()}, "a: is fp32, must be bf16"),
        ({"a": A[:, :31]}, "a: has 31 columns, must have 32"),
        ({"a": A.double()}, "a: dtype torch.float64"),
        ({"a": [1, 2]}, "a: list is neither"),
        ({"a": A.T}, "a: the columns of a row must lie without gaps"),
        ({"out": OUT[:2]}, "out: has 2 rows, needs 3"),
        ({"out": OUT[:, :60]}, "out: has 60 columns, must have 64"),
        ({"out": torch.zeros(3, 64, dtype=torch.int32)}, "out: is int32, must be one of"),
        ({"residual": OUT.float()}, "residual: is fp32, must be bf16"),
        ({"row_index": torch.tensor([0, 3], dtype=torch.int32)}, "row_index[1]: 3 is not between"),
        ({"row_index": torch.tensor([0, 1])}, "row_index: is int64, must be int32"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, object], named: str) -> None:
    given_arguments = {"a": A, "weight": WEIGHT, "out": OUT} | arguments
    with pytest.raises(InvalidArgumentError) as error:
        gemm.linear(**given_arguments)  # type: ignore[arg-type]
    assert named in str(error.value)


def test_one_product_takes_one_weight() -> None:
    with pytest.raises(InvalidArgumentError, match="weight: must be one matrix, is a group of 2"):
        gemm.linear(A, gemm.WeightGroup([WEIGHT, WEIGHT]), OUT)


@pytest.mark.parametrize("offsets", [[0, 2, 1], [1, 2, 3], [0, -1, 3]])
def test_offsets_must_ascend_from_zero(offsets: list[int]) -> None:
    group = gemm.WeightGroup([WEIGHT, WEIGHT])
    with pytest.raises(InvalidArgumentError, match="offsets: must ascend from 0"):
        gemm.grouped_linear(A, group, np.array(offsets, np.int32), OUT)


def test_packing_refuses_what_does_not_fit() -> None:
    pair = gemm.allocate(64, 32, "bf16", pair=True)
    rows = random(10, 32, "bf16")
    with pytest.raises(InvalidArgumentError, match="first_row: rows 60 to 69 are not within"):
        gemm.pack(WEIGHT, rows, first_row=60)
    with pytest.raises(InvalidArgumentError, match="role: 'plain' must be gate or up"):
        gemm.pack(pair, rows)
    with pytest.raises(InvalidArgumentError, match="role: 'up' must be plain"):
        gemm.pack(WEIGHT, rows, role="up")
    with pytest.raises(InvalidArgumentError, match="not a multiple of 64 bytes"):
        gemm.PackedWeight(WEIGHT.address + 32, 64, 32, "bf16")
    with pytest.raises(InvalidArgumentError, match="dtype: is int8, must be one of fp32, bf16"):
        gemm.packed_size_bytes(64, 32, "int8")
    with pytest.raises(InvalidArgumentError, match="differs in shape"):
        gemm.WeightGroup([WEIGHT, pair])
