"""The mixture-of-experts block in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from native.arrays import Array, as_array, as_vector, expect, expect_rows
from native.errors import InvalidArgumentError
from native.gemm import DTYPES, MAX_EXPERTS, MAX_TOP_K, PackedWeight, WeightGroup, aligned_bytes
from native.threads import ThreadPool, ffi, lib, pool_pointer


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """What a block needs: router (n_experts, hidden), for each expert a pair gate_up (inner,
    hidden) and down (hidden, inner), all of one dtype. top_k: experts of a token. renormalise:
    divide the chosen experts' probabilities by their sum (Mixtral: yes).

    Raises InvalidArgumentError where the shapes do not fit together.
    """

    router: PackedWeight
    gate_up: WeightGroup
    down: WeightGroup
    top_k: int
    renormalise: bool = True

    def __post_init__(self) -> None:
        n_experts, hidden, inner = self.router.n, self.router.k, self.gate_up.n
        if not 1 <= n_experts <= MAX_EXPERTS:
            raise InvalidArgumentError(f"router: {n_experts} experts, at most {MAX_EXPERTS}")
        if not 1 <= self.top_k <= min(MAX_TOP_K, n_experts):
            raise InvalidArgumentError(
                f"top_k: {self.top_k} is not between 1 and {min(MAX_TOP_K, n_experts)}"
            )
        for name, group, shape, pair in (
            ("gate_up", self.gate_up, (inner, hidden), True),
            ("down", self.down, (hidden, inner), False),
        ):
            if (group.n, group.k, group.pair) != (*shape, pair) or len(group) != n_experts:
                raise InvalidArgumentError(
                    f"{name}: must be {n_experts} packed {'pairs' if pair else 'weights'} {shape}, "
                    f"is {len(group)} of ({group.n}, {group.k})"
                )
            if group.dtype != self.router.dtype:
                raise InvalidArgumentError(
                    f"{name}: is {group.dtype}, the router is {self.router.dtype}"
                )


@dataclass(frozen=True, slots=True)
class MoeTimes:
    """Seconds that the parts of one call took, by the clock."""

    route_s: float
    gate_up_s: float
    down_s: float
    combine_s: float


class Workspace:
    """Memory for intermediate results, kept between calls and grown when needed. Not for two calls
    at once."""

    def __init__(self) -> None:
        self._memory: Array | None = None

    def reserve(self, size_bytes: int) -> int:
        """Address of at least `size_bytes`, 64-byte aligned; what was there before is lost."""
        if self._memory is None or self._memory.n_columns < size_bytes:
            self._memory = None
            self._memory = aligned_bytes(size_bytes)
        return self._memory.address

    @property
    def size_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self._memory is None else self._memory.n_columns


def workspace_bytes(weights: MoeWeights, n_tokens: int) -> int:
    """Bytes of intermediate results for a call with `n_tokens` tokens; constant above 4096."""
    call = _new_call(weights, n_tokens)
    return int(lib.ml_moe_workspace_bytes(ffi.addressof(call.shape)))


def moe(
    x: Any,
    weights: MoeWeights,
    out: Any,
    *,
    workspace: Workspace,
    residual: Any = None,
    expert_tokens: Any = None,
    pool: ThreadPool | None = None,
) -> MoeTimes:
    """out (n_tokens, hidden) = residual + block(x), x (n_tokens, hidden) being the normed input.

    x, out and residual have the weights' dtype; residual may be `out` itself, None stands for zero.
    expert_tokens (n_experts,) int64: incremented by the rows that each expert got. Rounding and the
    order of summation (ascending experts) are those of transformers' Mixtral.
    Raises InvalidArgumentError naming the argument.
    """
    rows, result = as_array(x, "x"), as_array(out, "out")
    n_tokens, hidden, dtype = rows.n_rows, weights.router.k, weights.router.dtype
    expect(rows, "x", dtype=dtype, columns=hidden)
    expect(result, "out", dtype=dtype, columns=hidden)
    expect_rows(result, "out", n_tokens)
    call = _new_call(weights, n_tokens)
    if residual is not None:
        added = as_array(residual, "residual")
        expect(added, "residual", dtype=dtype, columns=hidden)
        expect_rows(added, "residual", n_tokens)
        call.residual = ffi.cast("void *", added.address)
        call.residual_stride_bytes = added.stride_bytes
    if expert_tokens is not None:
        counts = as_vector(expert_tokens, "expert_tokens", "int64", weights.router.n)
        call.expert_tokens = ffi.cast("int64_t *", counts.address)
    call.x, call.x_stride_bytes = ffi.cast("void *", rows.address), rows.stride_bytes
    call.out, call.out_stride_bytes = ffi.cast("void *", result.address), result.stride_bytes
    size_bytes = lib.ml_moe_workspace_bytes(ffi.addressof(call.shape))
    call.workspace = ffi.cast("void *", workspace.reserve(size_bytes))
    lib.ml_moe(pool_pointer(pool), call)
    return MoeTimes(
        call.route_ns * 1e-9, call.gate_up_ns * 1e-9, call.down_ns * 1e-9, call.combine_ns * 1e-9
    )


def _new_call(weights: MoeWeights, n_tokens: int) -> Any:
    call = ffi.new("ml_moe_call *")
    shape = call.shape
    shape.n_tokens = n_tokens
    shape.hidden, shape.inner = weights.router.k, weights.gate_up.n
    shape.n_experts, shape.top_k = weights.router.n, weights.top_k
    shape.renormalise = weights.renormalise
    shape.dtype = DTYPES[weights.router.dtype]
    call.router = ffi.cast("void *", weights.router.address)
    call.gate_up, call.down = weights.gate_up.pointers, weights.down.pointers
    return call
