"""Attention over a paged KV cache, for tests, benchmarks and small tools.

The workers call the C functions of native/attention.h from C; this binding checks every argument
and works on numpy arrays. BF16 arrays have dtype uint16 and hold the upper halves of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native import isa
from native.errors import InvalidArgumentError, NotBuiltError

try:
    from native._attention import ffi, lib
except ImportError as error:
    raise NotBuiltError("_attention") from error

isa.apply(lib)

BLOCK_TOKENS: int = lib.ML_BLOCK_TOKENS
KV_DTYPES: dict[str, int] = {"fp32": lib.ML_FP32, "bf16": lib.ML_BF16, "int8": lib.ML_INT8}
OUT_DTYPES: dict[str, int] = {"fp32": lib.ML_FP32, "bf16": lib.ML_BF16}


@dataclass(frozen=True)
class AttentionShape:
    """Heads and dtypes of one attention layer. kv_dtype is a key of KV_DTYPES.

    Raises InvalidArgumentError where the kernels cannot run it.
    """

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    kv_dtype: str

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidArgumentError(
                f"kv_dtype: {self.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}"
            )
        wrong = lib.ml_shape_error(self.c_struct())
        if wrong != ffi.NULL:
            raise InvalidArgumentError(f"{ffi.string(wrong).decode()} (shape: {self})")

    def c_struct(self) -> Any:
        """The `ml_attention_shape *` of this shape."""
        return ffi.new(
            "ml_attention_shape *",
            (self.n_q_heads, self.n_kv_heads, self.head_dim, KV_DTYPES[self.kv_dtype]),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block (16 tokens, all KV heads) in one layer."""
        return int(lib.ml_kv_block_bytes(self.c_struct()))

    @property
    def activation_dtype(self) -> np.dtype[Any]:
        """dtype of q, k and v: float32 for an FP32 cache, else uint16 (BF16)."""
        return np.dtype(np.float32 if self.kv_dtype == "fp32" else np.uint16)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds finite float32 values to BF16 (nearest, ties to even)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of BF16 ones, exactly."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def new_arena(shape: AttentionShape, n_blocks: int, fill: int = 0) -> NDArray[np.uint8]:
    """One layer of `n_blocks` blocks of bytes `fill`: (n_blocks, block_bytes), 64-byte aligned."""
    size = n_blocks * shape.block_bytes
    raw = np.full(size + 63, fill, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(n_blocks, shape.block_bytes)


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidArgumentError(text)


def _check_arena(shape: AttentionShape, arena: NDArray[np.uint8]) -> None:
    _require(
        arena.dtype == np.uint8
        and arena.flags.c_contiguous
        and arena.ndim == 2
        and arena.shape[1] == shape.block_bytes
        and arena.ctypes.data % 64 == 0,
        f"arena: must be contiguous uint8 (n_blocks, {shape.block_bytes}), 64-byte aligned; "
        f"found {arena.dtype} {arena.shape}",
    )


def _check_table(
    arena: NDArray[np.uint8], table: NDArray[np.int32], begin_position: int, end_position: int
) -> None:
    _require(
        table.dtype == np.int32 and table.ndim == 1 and table.flags.c_contiguous,
        f"block_table: must be a contiguous int32 vector; found {table.dtype} {table.shape}",
    )
    used = table[begin_position // BLOCK_TOKENS : -(-end_position // BLOCK_TOKENS)]
    _require(
        end_position <= len(table) * BLOCK_TOKENS,
        f"block_table: {len(table)} blocks hold {len(table) * BLOCK_TOKENS} positions, "
        f"fewer than {end_position}",
    )
    _require(
        used.size == 0 or (used.min() >= 0 and used.max() < len(arena)),
        f"block_table: block numbers must be in [0, {len(arena)})",
    )


def _check_rows(shape: AttentionShape, name: str, rows: NDArray[Any], heads: int) -> None:
    _require(
        rows.dtype == shape.activation_dtype
        and rows.ndim == 3
        and rows.shape[1:] == (heads, shape.head_dim)
        and rows[0:1].flags.c_contiguous,
        f"{name}: must be {shape.activation_dtype} (n, {heads}, {shape.head_dim}) with "
        f"contiguous rows; found {rows.dtype} {rows.shape}",
    )


def _pointer(array: NDArray[Any], c_type: str = "void *") -> Any:
    return ffi.cast(c_type, array.ctypes.data)


def store(
    shape: AttentionShape,
    arena: NDArray[np.uint8],
    block_table: NDArray[np.int32],
    position: int,
    k: NDArray[Any],
    v: NDArray[Any],
) -> None:
    """Stores k and v, each (n_tokens, n_kv_heads, head_dim), from `position` of a sequence on.

    `arena` (n_blocks, block_bytes) is one layer; entry i of `block_table` holds positions
    16 i … 16 i + 15. Rows of k and v may be strided, equally. Raises InvalidArgumentError.
    """
    _check_arena(shape, arena)
    _check_rows(shape, "k", k, shape.n_kv_heads)
    _check_rows(shape, "v", v, shape.n_kv_heads)
    _require(
        k.shape == v.shape and k.strides == v.strides, "v: must have the shape and strides of k"
    )
    _require(position >= 0, f"position: must be at least 0; found {position}")
    _check_table(arena, block_table, position, position + len(k))
    lib.ml_kv_store(
        shape.c_struct(),
        _pointer(arena),
        _pointer(block_table, "int32_t *"),
        position,
        len(k),
        _pointer(k),
        _pointer(v),
        k.strides[0],
    )


def attend(
    shape: AttentionShape,
    arena: NDArray[np.uint8],
    block_table: NDArray[np.int32],
    q: NDArray[Any],
    query_position: int,
    kv_range: tuple[int, int],
    scale: float,
    new_kv: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Causal attention of q (n_queries, n_q_heads, head_dim), at `query_position` and onwards.

    Looks at positions [begin, end) = kv_range, begin a multiple of 16. Returns out
    (n_queries, n_q_heads, head_dim), normalised over that range, and lse (n_queries, n_q_heads),
    the natural logarithm of the sum of exp(scale · q·k); a row that sees nothing gives 0 and -inf.
    `new_kv`, k and v each (1, n_kv_heads, head_dim), is stored at position end − 1 on the way.
    Raises InvalidArgumentError.
    """
    begin, end = kv_range
    _check_arena(shape, arena)
    _check_rows(shape, "q", q, shape.n_q_heads)
    _require(
        0 <= begin <= end and begin % BLOCK_TOKENS == 0,
        f"kv_range: needs 0 <= begin <= end and begin a multiple of {BLOCK_TOKENS}; "
        f"found {kv_range}",
    )
    _require(query_position >= 0, f"query_position: must be at least 0; found {query_position}")
    _check_table(arena, block_table, begin, end)
    # NaN first, so that what the kernel does not write is seen.
    out = np.full(q.shape, np.nan, dtype=np.float32)
    lse = np.full(q.shape[:2], np.nan, dtype=np.float32)
    task = ffi.new("ml_attend_task *")
    task.arena_layer, task.block_table = _pointer(arena), _pointer(block_table, "int32_t *")
    task.q, task.q_row_stride_bytes = _pointer(q), q.strides[0]
    task.out, task.lse = _pointer(out, "float *"), _pointer(lse, "float *")
    task.kv_begin, task.kv_end = begin, end
    task.n_queries, task.query_position, task.scale = len(q), query_position, scale
    if new_kv is not None:
        for name, rows in zip(("new k", "new v"), new_kv, strict=True):
            _check_rows(shape, name, rows, shape.n_kv_heads)
            _require(len(rows) == 1, f"{name}: must be one row; found {len(rows)}")
        _require(
            begin < end <= query_position + len(q),
            f"new_kv: the last query must see position {end - 1}, where it is stored",
        )
        task.new_k, task.new_v = (_pointer(rows) for rows in new_kv)
    lib.ml_attend(shape.c_struct(), task)
    return out, lse


def merge(
    out_parts: NDArray[np.float32], lse_parts: NDArray[np.float32], out_dtype: str = "fp32"
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Merges results over several KV ranges into one over all of them.

    out_parts (n_splits, n_rows, head_dim), lse_parts (n_splits, n_rows), both float32 and
    contiguous. Returns out (n_rows, head_dim) as `fp32` or `bf16` and lse (n_rows).
    Raises InvalidArgumentError.
    """
    _require(
        out_parts.ndim == 3
        and out_parts.dtype == np.float32
        and out_parts.flags.c_contiguous
        and out_parts.shape[2] % 16 == 0,
        "out_parts: must be contiguous float32 (n_splits, n_rows, head_dim), head_dim % 16 == 0",
    )
    _require(
        lse_parts.shape == out_parts.shape[:2]
        and lse_parts.dtype == np.float32
        and lse_parts.flags.c_contiguous,
        f"lse_parts: must be contiguous float32 {out_parts.shape[:2]}",
    )
    _require(out_dtype in OUT_DTYPES, f"out_dtype: {out_dtype!r} is not one of fp32, bf16")
    n_splits, n_rows, head_dim = out_parts.shape
    _require(1 <= n_splits <= 4096, f"out_parts: n_splits must be in 1..4096; found {n_splits}")
    out = np.empty((n_rows, head_dim), np.float32 if out_dtype == "fp32" else np.uint16)
    lse = np.empty(n_rows, np.float32)
    task = ffi.new("ml_merge_task *")
    task.out_parts, task.lse_parts = (
        _pointer(out_parts, "float *"),
        _pointer(lse_parts, "float *"),
    )
    task.out_split_stride, task.lse_split_stride = n_rows * head_dim, n_rows
    task.out, task.lse = _pointer(out), _pointer(lse, "float *")
    task.n_splits, task.n_rows, task.head_dim = n_splits, n_rows, head_dim
    task.out_dtype = OUT_DTYPES[out_dtype]
    lib.ml_merge(task)
    return out, lse
