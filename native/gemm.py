"""Matrix products with packed weights, and the mixture-of-experts block, on the CPU.

A weight (n, k) is packed once into plain bytes of a size known beforehand (`packed_size_bytes`)
at a 64-byte aligned address; the bytes may be copied anywhere. Several sources may fill one packed
weight: q, k and v row ranges, or gate and up as a pair. Operations take torch tensors (CPU), numpy
arrays (BF16 as uint16) or `native.arrays.Array`, write into tensors that the caller provides,
release the GIL, and raise InvalidArgumentError naming the argument that is wrong.

A row's result depends on that row alone, to the bit: not on the other rows, their number, or the
number of threads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from native import isa
from native.arrays import ITEM_BYTES, Array, as_array, as_vector, expect, expect_rows
from native.errors import InvalidArgumentError
from native.threads import ThreadPool, ffi, lib, pool_pointer

DTYPES: dict[str, int] = {"fp32": lib.ML_FP32, "bf16": lib.ML_BF16}
ALIGNMENT_BYTES: int = lib.ML_PACKED_ALIGNMENT_BYTES
MAX_EXPERTS: int = lib.ML_MAX_EXPERTS
MAX_TOP_K: int = lib.ML_MAX_TOP_K
_ROLES = {"plain": lib.ML_PACK_PLAIN, "gate": lib.ML_PACK_GATE, "up": lib.ML_PACK_UP}


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this machine runs, plainest first."""
    return isa.supported(lib)


def selected_isa() -> str:
    """The instruction set that the operations use."""
    return isa.selected(lib)


def select_isa(name: str) -> None:
    """Use this instruction set from now on (all threads). Not while an operation runs."""
    isa.select(lib, name)


def dtype_code(dtype: str, name: str) -> int:
    """The C number of "fp32" or "bf16". Raises InvalidArgumentError for anything else."""
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"{name}: is {dtype}, must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def packed_size_bytes(n: int, k: int, dtype: str, *, pair: bool = False) -> int:
    """Bytes of a packed (n, k) weight, or of a pair (gate and up, each (n, k)); a multiple of 256.

    A BF16 weight whose n is a multiple of 64 (32 for a pair) and whose k is even takes exactly the
    bytes of its elements.
    """
    code = dtype_code(dtype, "dtype")
    if n < 1 or k < 1:
        raise InvalidArgumentError(f"n, k: ({n}, {k}) must be at least 1")
    size = lib.ml_packed_pair_size_bytes if pair else lib.ml_packed_size_bytes
    return int(size(n, k, code))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight at `address`, (n, k) of `dtype` ("fp32" or "bf16"); a pair holds gate and up,
    each (n, k). owner: what keeps the memory alive.

    Raises InvalidArgumentError where the shape, dtype or alignment is not possible.
    """

    address: int
    n: int
    k: int
    dtype: str
    pair: bool = False
    owner: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        packed_size_bytes(self.n, self.k, self.dtype, pair=self.pair)
        if self.address == 0 or self.address % ALIGNMENT_BYTES:
            raise InvalidArgumentError(
                f"address: {self.address:#x} is not a multiple of {ALIGNMENT_BYTES} bytes"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes from `address` on that the weight takes."""
        return packed_size_bytes(self.n, self.k, self.dtype, pair=self.pair)


def allocate(n: int, k: int, dtype: str, *, pair: bool = False) -> PackedWeight:
    """A packed weight in memory of its own, its contents not yet set."""
    memory = aligned_bytes(packed_size_bytes(n, k, dtype, pair=pair))
    return PackedWeight(memory.address, n, k, dtype, pair, memory.owner)


def aligned_bytes(size_bytes: int) -> Array:
    """Fresh memory of `size_bytes` at a 64-byte aligned address, kept alive by the Array."""
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = memory.__array_interface__["data"][0]
    return Array(start + -start % ALIGNMENT_BYTES, 1, size_bytes, size_bytes, "uint8", memory)


def pack(
    weight: PackedWeight,
    source: Any,
    *,
    first_row: int = 0,
    role: str = "plain",
    pool: ThreadPool | None = None,
) -> None:
    """Packs `source` (rows, k), FP32 or BF16, as rows first_row, first_row + 1, ... of `weight`.

    role: "gate" or "up" for a pair, "plain" otherwise. A source of another type than the weight's
    is rounded to nearest even. Every row of the weight must be packed once; padding is cleared with
    the last row. Fastest where ranges begin and end at multiples of 32 rows.
    """
    rows = as_array(source, "source")
    expect(rows, "source", columns=weight.k)
    call = _pack_call(weight, rows.n_rows, rows.dtype, first_row, role)
    call.source = ffi.cast("void *", rows.address)
    call.source_stride_bytes = rows.stride_bytes
    lib.ml_pack(pool_pointer(pool), call)


def pack_file(
    weight: PackedWeight,
    descriptor: int,
    offset_bytes: int,
    n_rows: int,
    source_dtype: str,
    scratch: Any,
    *,
    first_row: int = 0,
    role: str = "plain",
    pool: ThreadPool | None = None,
) -> None:
    """`pack` of rows that lie one after the other in an open file, from `offset_bytes` on.

    scratch: memory (uint8) for at least 64 rows, which they pass through. Raises EOFError where the
    file ends before the rows do, OSError where it cannot be read.
    """
    call = _pack_call(weight, n_rows, source_dtype, first_row, role)
    memory = as_array(scratch, "scratch")
    scratch_bytes = memory.n_rows * memory.n_columns
    least_bytes = lib.ML_PANEL_COLUMNS * weight.k * ITEM_BYTES[source_dtype]
    if memory.dtype != "uint8" or scratch_bytes < least_bytes:
        raise InvalidArgumentError(f"scratch: must be at least {least_bytes} bytes of uint8")
    address = ffi.cast("void *", memory.address)
    status = lib.ml_pack_file(
        pool_pointer(pool), call, descriptor, offset_bytes, address, scratch_bytes
    )
    if status < 0:
        raise EOFError(f"the file ends within {n_rows} rows from byte {offset_bytes} on")
    if status > 0:
        raise OSError(status, os.strerror(status))


def _pack_call(
    weight: PackedWeight, n_rows: int, source_dtype: str, first_row: int, role: str
) -> Any:
    """All of an `ml_pack_call *` but where the source is."""
    source_code = dtype_code(source_dtype, "source")
    if role not in _ROLES or (role != "plain") != weight.pair:
        allowed = "gate or up for a pair" if weight.pair else "plain for a weight that is no pair"
        raise InvalidArgumentError(f"role: {role!r} must be {allowed}")
    if first_row < 0 or first_row + n_rows > weight.n:
        raise InvalidArgumentError(
            f"first_row: rows {first_row} to {first_row + n_rows - 1} are not within "
            f"the weight's {weight.n}"
        )
    call = ffi.new("ml_pack_call *")
    call.packed = ffi.cast("void *", weight.address)
    call.n, call.k = weight.n, weight.k
    call.first_row, call.n_rows = first_row, n_rows
    call.packed_dtype, call.source_dtype = DTYPES[weight.dtype], source_code
    call.role = _ROLES[role]
    return call


class WeightGroup:
    """Packed weights of one shape and dtype, one for each expert, as `grouped_linear` takes them.

    Raises InvalidArgumentError where they differ or there are none.
    """

    __slots__ = ("dtype", "k", "n", "pair", "pointers", "weights")

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        if not weights:
            raise InvalidArgumentError("weights: must not be empty")
        first = weights[0]
        for i, w in enumerate(weights):
            if (w.n, w.k, w.dtype, w.pair) != (first.n, first.k, first.dtype, first.pair):
                raise InvalidArgumentError(f"weights[{i}]: {w} differs in shape from {first}")
        self.n, self.k, self.dtype, self.pair = first.n, first.k, first.dtype, first.pair
        self.weights = tuple(weights)
        self.pointers = ffi.new(
            "void *[]", [ffi.cast("void *", weight.address) for weight in weights]
        )

    def __len__(self) -> int:
        return len(self.weights)


def linear(
    a: Any,
    weight: PackedWeight | WeightGroup,
    out: Any,
    *,
    residual: Any = None,
    row_index: Any = None,
    pool: ThreadPool | None = None,
) -> None:
    """out (m, n) = a (m, k) times weight (n, k) transposed; a pair gives silu(gate) * up.

    a: the weight's dtype. out: FP32 or BF16, its rows may lie apart. residual (m, n), like out: is
    added to the product; may be `out` itself. row_index (m,) int32: row i of the product is of
    a[row_index[i]]. BF16 weights: sums are FP32; the product, gate, up and silu(gate) are rounded
    to BF16 where transformers' are, except that an FP32 `out` without residual is not rounded.
    """
    group = WeightGroup([weight]) if isinstance(weight, PackedWeight) else weight
    if len(group) != 1:
        raise InvalidArgumentError(f"weight: must be one matrix, is a group of {len(group)}")
    rows = as_array(a, "a")
    n_rows = rows.n_rows if row_index is None else _length(row_index, "row_index")
    bounds = ffi.new("int32_t[2]", (0, n_rows))
    _multiply(rows, group, bounds, n_rows, out, residual, row_index, pool)


def grouped_linear(
    a: Any,
    weights: WeightGroup,
    offsets: Any,
    out: Any,
    *,
    residual: Any = None,
    row_index: Any = None,
    pool: ThreadPool | None = None,
) -> None:
    """`linear` with weights[g] for the rows offsets[g] ... offsets[g + 1] - 1.

    offsets (len(weights) + 1,) int32: ascending from 0 to m. The rest is as for `linear`.
    """
    bounds = as_vector(offsets, "offsets", "int32", len(weights) + 1)
    pointer = ffi.cast("int32_t *", bounds.address)
    n_rows = _check_offsets(ffi.unpack(pointer, len(weights) + 1))
    _multiply(as_array(a, "a"), weights, pointer, n_rows, out, residual, row_index, pool)


def _multiply(
    rows: Array,
    weights: WeightGroup,
    offsets: Any,
    n_rows: int,
    out: Any,
    residual: Any,
    row_index: Any,
    pool: ThreadPool | None,
) -> None:
    result = as_array(out, "out")
    expect(rows, "a", dtype=weights.dtype, columns=weights.k)
    expect(result, "out", columns=weights.n)
    expect_rows(result, "out", n_rows)
    call = ffi.new("ml_gemm_call *")
    if row_index is None:
        expect_rows(rows, "a", n_rows)
    else:
        index = as_vector(row_index, "row_index", "int32", n_rows)
        check_index(index, "row_index", rows.n_rows)
        call.row_index = ffi.cast("int32_t *", index.address)
    call.epilogue = lib.ML_SWIGLU if weights.pair else lib.ML_STORE
    if residual is not None:
        _set_residual(call, weights, result, as_array(residual, "residual"), n_rows)
    call.offsets = offsets
    call.weights = weights.pointers
    call.a, call.a_stride_bytes = ffi.cast("void *", rows.address), rows.stride_bytes
    call.out, call.out_stride_bytes = ffi.cast("void *", result.address), result.stride_bytes
    call.n_groups, call.n_out, call.k = len(weights), weights.n, weights.k
    call.dtype = DTYPES[weights.dtype]
    call.out_dtype = dtype_code(result.dtype, "out")
    lib.ml_gemm(pool_pointer(pool), call)


def _length(value: Any, name: str) -> int:
    array = as_array(value, name)
    return array.n_rows * array.n_columns


def _check_offsets(values: Sequence[int]) -> int:
    """Number of rows that the offsets give out. Raises InvalidArgumentError unless they ascend."""
    if values[0] != 0 or any(a > b for a, b in itertools.pairwise(values)):
        raise InvalidArgumentError(f"offsets: must ascend from 0, are {values[:8]}...")
    return values[-1]


def _set_residual(
    call: Any, weights: WeightGroup, result: Array, residual: Array, n_rows: int
) -> None:
    if weights.pair:
        raise InvalidArgumentError("residual: a pair (gate and up) takes none")
    expect(residual, "residual", dtype=result.dtype, columns=weights.n)
    expect_rows(residual, "residual", n_rows)
    call.epilogue = lib.ML_ADD
    call.residual = ffi.cast("void *", residual.address)
    call.residual_stride_bytes = residual.stride_bytes


def check_index(index: Array, name: str, limit: int) -> None:
    """Raises InvalidArgumentError where an int32 index is negative or not below `limit`."""
    n = index.n_rows * index.n_columns
    at = lib.ml_find_out_of_range(ffi.cast("int32_t *", index.address), n, limit)
    if at >= 0:
        value = ffi.cast("int32_t *", index.address)[at]
        raise InvalidArgumentError(f"{name}[{at}]: {value} is not between 0 and {limit - 1}")
