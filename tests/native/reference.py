"""Attention in float64, straight from its definition, and random paged input for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native import attention
from native.attention import AttentionShape

# ‖out − ref‖ / ‖ref‖ that the kernels must stay below, by KV dtype.
ERROR_LIMITS = {"fp32": 2e-6, "bf16": 4e-3, "int8": 2e-2}
# Of the log-sum-exp, absolute (it is of order 1 to 10).
LSE_LIMITS = {"fp32": 1e-5, "bf16": 4e-3, "int8": 3e-2}


def relative_error(found: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """‖found − expected‖ / ‖expected‖; NaN in `found` gives NaN."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def reference_attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], query_position: int, scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """q (n, heads, dim) over k, v (context, kv_heads, dim): out (n, heads, dim), lse (n, heads)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n_queries, n_heads, head_dim = q.shape
    context, n_kv_heads, _ = k.shape
    ratio = n_heads // n_kv_heads
    out = np.empty((n_queries, n_heads, head_dim))
    lse = np.empty((n_queries, n_heads))
    hidden = np.arange(context) > query_position + np.arange(n_queries)[:, None]
    for head in range(n_heads):
        scores = q[:, head] @ k[:, head // ratio].T * scale
        scores[hidden] = -np.inf
        largest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        out[:, head] = weights / total @ v[:, head // ratio]
        lse[:, head] = (largest + np.log(total))[:, 0]
    return out, lse


@dataclass
class Case:
    """A sequence stored in a poisoned arena at random blocks, and queries at its end."""

    shape: AttentionShape
    arena: NDArray[np.uint8]
    table: NDArray[np.int32]
    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    scale: float

    @property
    def context(self) -> int:
        return len(self.k)

    @property
    def query_position(self) -> int:
        return len(self.k) - len(self.q)

    def attend(self, first: int = 0, count: int | None = None, **changes: Any) -> Any:
        """The kernel's (out, lse) for queries [first, first + count)."""
        q = self.q[first : len(self.q) if count is None else first + count]
        arguments = {"kv_range": (0, self.context), "scale": self.scale} | changes
        position = self.query_position + first
        return attention.attend(self.shape, self.arena, self.table, q, position, **arguments)

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        q, k, v = (self.as_float(x) for x in (self.q, self.k, self.v))
        return reference_attention(q, k, v, self.query_position, self.scale)

    def as_float(self, values: NDArray[Any]) -> NDArray[np.float32]:
        return values if values.dtype == np.float32 else attention.from_bf16(values)


def make_case(
    shape: AttentionShape, context: int, n_queries: int, seed: int, spread: float = 1.0
) -> Case:
    """Standard normal q (times `spread`), k, v; the arena is NaN wherever nothing is stored."""
    rng = np.random.default_rng(seed)
    n_blocks = -(-context // attention.BLOCK_TOKENS)
    arena = attention.new_arena(shape, n_blocks + 3, fill=0xFF)
    table = rng.permutation(n_blocks + 3)[:n_blocks].astype(np.int32)

    def normal(rows: int, heads: int, size: float = 1.0) -> NDArray[Any]:
        values = rng.standard_normal((rows, heads, shape.head_dim), dtype=np.float32) * size
        values = values.astype(np.float32)
        return values if shape.kv_dtype == "fp32" else attention.to_bf16(values)

    q = normal(n_queries, shape.n_q_heads, spread)
    k, v = normal(context, shape.n_kv_heads), normal(context, shape.n_kv_heads)
    attention.store(shape, arena, table, 0, k, v)
    return Case(shape, arena, table, q, k, v, shape.head_dim**-0.5)
