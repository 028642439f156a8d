"""What lies between a layer's matrix products, on the CPU: norm, rotary embedding, routing, rows.

Arguments are torch tensors (CPU), numpy arrays (BF16 as uint16) or `native.arrays.Array`; "dtype"
is FP32 or BF16 and common to the activations of a call. Results go into what the caller provides.
Each row's result depends on that row alone. All raise InvalidArgumentError naming the argument.
"""

from __future__ import annotations

from typing import Any

from native.arrays import ITEM_BYTES, Array, as_array, as_vector, expect, expect_rows
from native.errors import InvalidArgumentError
from native.gemm import MAX_EXPERTS, MAX_TOP_K, check_index, dtype_code
from native.threads import ThreadPool, ffi, lib, pool_pointer


def _pointer(array: Array) -> Any:
    return ffi.cast("void *", array.address)


def rms_norm(
    hidden: Any,
    weight: Any,
    out: Any,
    *,
    eps: float,
    delta: Any = None,
    pool: ThreadPool | None = None,
) -> None:
    """hidden += delta (where given), then out = hidden / sqrt(mean(hidden^2) + eps) * weight.

    hidden, delta, out (rows, n), weight (n,), all of one dtype; out may be hidden only without a
    later use of hidden.
    """
    rows, result = as_array(hidden, "hidden"), as_array(out, "out")
    code = dtype_code(rows.dtype, "hidden")
    scale = as_vector(weight, "weight", rows.dtype, rows.n_columns)
    expect(result, "out", dtype=rows.dtype, columns=rows.n_columns)
    expect_rows(result, "out", rows.n_rows)
    call = ffi.new("ml_rms_norm_call *")
    if delta is not None:
        added = as_array(delta, "delta")
        expect(added, "delta", dtype=rows.dtype, columns=rows.n_columns)
        expect_rows(added, "delta", rows.n_rows)
        call.delta, call.delta_stride_bytes = _pointer(added), added.stride_bytes
    call.hidden, call.hidden_stride_bytes = _pointer(rows), rows.stride_bytes
    call.out, call.out_stride_bytes = _pointer(result), result.stride_bytes
    call.weight = _pointer(scale)
    call.n_rows, call.n, call.eps, call.dtype = rows.n_rows, rows.n_columns, eps, code
    lib.ml_rms_norm(pool_pointer(pool), call)


def rotary(
    qkv: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    n_q_heads: int,
    n_kv_heads: int,
    head_dim: int,
    out_index: Any = None,
    pool: ThreadPool | None = None,
) -> None:
    """Splits qkv (rows, (n_q_heads + 2 n_kv_heads) head_dim), rotates q and k, copies v.

    positions (rows,) int32. cos, sin (max positions, rotary_dim / 2) FP32: dimension i of a head is
    rotated with dimension i + rotary_dim / 2; dimensions from rotary_dim on stay. With BF16 the
    angles and products are rounded as in transformers. q (any, n_q_heads head_dim), k and v
    (any, n_kv_heads head_dim): row r, or row out_index[r], gets the result; rows may lie apart.
    """
    rows = as_array(qkv, "qkv")
    code = dtype_code(rows.dtype, "qkv")
    expect(rows, "qkv", columns=(n_q_heads + 2 * n_kv_heads) * head_dim)
    call = ffi.new("ml_rotary_call *")
    _set_angles(call, positions, as_array(cos, "cos"), as_array(sin, "sin"), rows, head_dim)
    results = [as_array(q, "q"), as_array(k, "k"), as_array(v, "v")]
    for name, heads, result in zip(
        "qkv", (n_q_heads, n_kv_heads, n_kv_heads), results, strict=True
    ):
        expect(result, name, dtype=rows.dtype, columns=heads * head_dim)
    n_out = min(result.n_rows for result in results)
    if out_index is None:
        for name, result in zip("qkv", results, strict=True):
            expect_rows(result, name, rows.n_rows)
    else:
        places = as_vector(out_index, "out_index", "int32", rows.n_rows)
        check_index(places, "out_index", n_out)
        call.out_index = ffi.cast("int32_t *", places.address)
    call.qkv, call.qkv_stride_bytes = _pointer(rows), rows.stride_bytes
    call.q, call.k, call.v = map(_pointer, results)
    call.q_stride_bytes, call.k_stride_bytes, call.v_stride_bytes = (
        result.stride_bytes for result in results
    )
    call.n_rows, call.n_q_heads, call.n_kv_heads = rows.n_rows, n_q_heads, n_kv_heads
    call.head_dim, call.dtype = head_dim, code
    lib.ml_rotary(pool_pointer(pool), call)


def _set_angles(
    call: Any, positions: Any, cos: Array, sin: Array, rows: Array, head_dim: int
) -> None:
    at = as_vector(positions, "positions", "int32", rows.n_rows)
    check_index(at, "positions", min(cos.n_rows, sin.n_rows))
    if not 1 <= cos.n_columns <= head_dim // 2:
        raise InvalidArgumentError(f"cos: {cos.n_columns} columns, at most {head_dim // 2}")
    for name, table in (("cos", cos), ("sin", sin)):
        expect(table, name, dtype="fp32", columns=cos.n_columns)
        if table.n_rows > 1 and table.stride_bytes != table.n_columns * ITEM_BYTES["fp32"]:
            raise InvalidArgumentError(f"{name}: rows must lie without gaps")
    call.positions = ffi.cast("int32_t *", at.address)
    call.cos, call.sin = (ffi.cast("float *", table.address) for table in (cos, sin))
    call.rotary_dim = 2 * cos.n_columns


def route(
    logits: Any,
    experts: Any,
    weights: Any,
    *,
    renormalise: bool = True,
    pool: ThreadPool | None = None,
) -> None:
    """The top_k experts of each row by softmax (FP32), most likely first; ties: lower number first.

    logits (rows, n_experts) of dtype; experts (rows, top_k) int32 and weights (rows, top_k) FP32,
    without gaps, get the result. renormalise: divide a row's weights by their sum.
    """
    rows, chosen = as_array(logits, "logits"), as_array(experts, "experts")
    code = dtype_code(rows.dtype, "logits")
    top_k = chosen.n_columns if chosen.n_rows == rows.n_rows else 0
    if not 1 <= rows.n_columns <= MAX_EXPERTS:
        raise InvalidArgumentError(f"logits: {rows.n_columns} experts, at most {MAX_EXPERTS}")
    if not 1 <= top_k <= min(MAX_TOP_K, rows.n_columns):
        raise InvalidArgumentError(
            f"experts: must be ({rows.n_rows}, top_k) with top_k at most "
            f"{min(MAX_TOP_K, rows.n_columns)}, is ({chosen.n_rows}, {chosen.n_columns})"
        )
    as_vector(experts, "experts", "int32", rows.n_rows * top_k)
    shares = as_vector(weights, "weights", "fp32", rows.n_rows * top_k)
    call = ffi.new("ml_route_call *")
    call.logits, call.logits_stride_bytes = _pointer(rows), rows.stride_bytes
    call.experts = ffi.cast("int32_t *", chosen.address)
    call.weights = ffi.cast("float *", shares.address)
    call.n_rows, call.n_experts, call.top_k = rows.n_rows, rows.n_columns, top_k
    call.renormalise, call.dtype = renormalise, code
    lib.ml_route(pool_pointer(pool), call)


def sort_by_expert(
    experts: Any, n_experts: int, offsets: Any, row_index: Any, position: Any
) -> None:
    """Sorts the (row, choice) pairs of experts (rows, top_k) by expert, rows ascending in each.

    All int32. offsets (n_experts + 1,): expert e has places offsets[e] to offsets[e + 1] - 1.
    row_index (rows * top_k,): the row at each place. position (rows, top_k): each pair's place.
    """
    chosen = as_array(experts, "experts")
    n_pairs = chosen.n_rows * chosen.n_columns
    pairs = as_vector(experts, "experts", "int32", n_pairs)
    check_index(pairs, "experts", n_experts)
    arrays = (
        pairs,
        as_vector(offsets, "offsets", "int32", n_experts + 1),
        as_vector(row_index, "row_index", "int32", n_pairs),
        as_vector(position, "position", "int32", n_pairs),
    )
    sorted_by, *results = (ffi.cast("int32_t *", array.address) for array in arrays)
    lib.ml_sort_by_expert(sorted_by, chosen.n_rows, chosen.n_columns, n_experts, *results)


def combine(
    expert_out: Any,
    position: Any,
    weights: Any,
    out: Any,
    *,
    residual: Any = None,
    pool: ThreadPool | None = None,
) -> None:
    """out[r] = residual[r] + sum of weights[r, j] * expert_out[position[r, j]], in order of place.

    expert_out (rows * top_k, n), residual and out (rows, n) of one dtype; position (rows, top_k)
    int32 and weights (rows, top_k) FP32. residual may be out itself; None stands for zero.
    """
    parts, result = as_array(expert_out, "expert_out"), as_array(out, "out")
    code = dtype_code(parts.dtype, "expert_out")
    n_rows, n = result.n_rows, parts.n_columns
    places = as_array(position, "position")
    top_k = places.n_columns if places.n_rows == n_rows else 0
    if not 1 <= top_k <= MAX_TOP_K:
        raise InvalidArgumentError(
            f"position: must be ({n_rows}, top_k), top_k at most {MAX_TOP_K}"
        )
    expect(result, "out", dtype=parts.dtype, columns=n)
    places = as_vector(position, "position", "int32", n_rows * top_k)
    check_index(places, "position", parts.n_rows)
    shares = as_vector(weights, "weights", "fp32", n_rows * top_k)
    call = ffi.new("ml_combine_call *")
    if residual is not None:
        added = as_array(residual, "residual")
        expect(added, "residual", dtype=parts.dtype, columns=n)
        expect_rows(added, "residual", n_rows)
        call.residual, call.residual_stride_bytes = _pointer(added), added.stride_bytes
    call.expert_out, call.expert_stride_bytes = _pointer(parts), parts.stride_bytes
    call.position = ffi.cast("int32_t *", places.address)
    call.weights = ffi.cast("float *", shares.address)
    call.out, call.out_stride_bytes = _pointer(result), result.stride_bytes
    call.n_rows, call.n, call.top_k, call.dtype = n_rows, n, top_k, code
    lib.ml_combine(pool_pointer(pool), call)


def gather_rows(table: Any, ids: Any, out: Any, *, pool: ThreadPool | None = None) -> None:
    """out[r] = table[ids[r]]: the embedding. ids (rows,) int32; table and out of one dtype."""
    source, result = as_array(table, "table"), as_array(out, "out")
    expect(result, "out", dtype=source.dtype, columns=source.n_columns)
    rows = as_vector(ids, "ids", "int32", result.n_rows)
    check_index(rows, "ids", source.n_rows)
    lib.ml_gather_rows(
        pool_pointer(pool),
        _pointer(source),
        source.stride_bytes,
        ffi.cast("int32_t *", rows.address),
        result.n_rows,
        source.n_columns * ITEM_BYTES[source.dtype],
        _pointer(result),
        result.stride_bytes,
    )


def argmax(x: Any, out: Any, *, pool: ThreadPool | None = None) -> None:
    """out (rows,) int64: first index of the largest of x (rows, n); -1 where a row has a NaN."""
    rows = as_array(x, "x")
    code = dtype_code(rows.dtype, "x")
    result = as_vector(out, "out", "int64", rows.n_rows)
    lib.ml_argmax(
        pool_pointer(pool),
        _pointer(rows),
        rows.stride_bytes,
        rows.n_rows,
        rows.n_columns,
        code,
        ffi.cast("int64_t *", result.address),
    )


def convert(source: Any, out: Any, *, pool: ThreadPool | None = None) -> None:
    """out (rows, n) = source, between FP32 and BF16 (to nearest even)."""
    rows, result = as_array(source, "source"), as_array(out, "out")
    codes = dtype_code(rows.dtype, "source"), dtype_code(result.dtype, "out")
    expect(result, "out", columns=rows.n_columns)
    expect_rows(result, "out", rows.n_rows)
    lib.ml_convert(
        pool_pointer(pool),
        _pointer(rows),
        rows.stride_bytes,
        codes[0],
        _pointer(result),
        result.stride_bytes,
        codes[1],
        rows.n_rows,
        rows.n_columns,
    )
