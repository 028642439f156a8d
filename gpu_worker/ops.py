"""The operations of a decoder layer, as the model asks a device for them.

An `Ops` owns the number formats: how a linear layer's matrix is stored in the weight blocks, in
which type activations are, and what accumulates in which precision. `TorchOps` runs on any torch
device; `gpu_worker.cpu_ops` uses our own kernels.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from gpu_worker.checkpoint import StoredRows
from gpu_worker.timing import OpTimes

Tensor = torch.Tensor


class Linear(Protocol):
    """Matrices of one shape as a device stores them; only the ops that made it look inside."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(count, rows, columns); of a SwiGLU pair rows are those of gate and up together."""
        ...


class Ops(Protocol):
    """Activations are (tokens, features) of `dtype` on `device`, rows contiguous."""

    dtype: torch.dtype
    device: torch.device
    times: OpTimes

    def matrix_bytes(self, rows: int, columns: int, swiglu: bool) -> int:
        """Stored size of one matrix."""
        ...

    def plain_matrix(self, memory: Tensor, rows: int, columns: int) -> Tensor | None:
        """The stored matrix as rows in order, where that is how it is stored: a shard can then be
        read right into it. None where a matrix has to be packed."""
        ...

    def pack(
        self,
        memory: Tensor,
        rows: int,
        columns: int,
        first_row: int,
        swiglu: bool,
        source: StoredRows,
    ) -> None:
        """Store what `source` reads, of any float type, as the matrix's rows from `first_row`."""
        ...

    def linear(self, memory: Tensor, count: int, rows: int, columns: int, swiglu: bool) -> Linear:
        """`count` stored matrices in device memory (uint8), one behind the other."""
        ...

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of the table (int32 ids), in memory of their own."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...

    def project(self, x: Tensor, weight: Linear) -> Tensor:
        """x · Wᵀ in `dtype`."""
        ...

    def project_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        """residual + x · Wᵀ; may overwrite the residual."""
        ...

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        """x · Wᵀ in FP32."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Of each row the first index of the largest value, int64; -1 where a row has a NaN."""
        ...

    def rotate_split(
        self, qkv: Tensor, positions: Tensor, table: "RotaryTable", q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Split qkv (tokens, (q heads + 2 kv heads) · dim), rotate q and k by position (int32),
        and write q (tokens, q heads, dim) and k, v (tokens, kv heads, dim)."""
        ...

    def experts_add(
        self, x: Tensor, router: Linear, gate_up: Linear, down: Linear, top_k: int, residual: Tensor
    ) -> Tensor:
        """residual + Σ_e p_e · down_e(silu(gate_e x) · up_e x) over each token's `top_k` experts,
        p being the softmax over all experts, renormalised over the chosen; may overwrite the
        residual."""
        ...


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of position · θ^(-2i/dim), each FP32 (positions, dim / 2)."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def build(n_positions: int, head_dim: int, theta: float, device: torch.device) -> "RotaryTable":
        """The table of the first `n_positions` positions."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(n_positions, dtype=torch.float32), theta**-exponents)
        return RotaryTable(angles.cos().to(device), angles.sin().to(device))


@dataclass(frozen=True)
class PlainLinear:
    """Matrices as torch stores them: (count, rows, columns)."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, columns = self.weight.shape
        return count, rows, columns


class TorchOps:
    """Every operation with torch, on any of its devices; the semantics of transformers' Mixtral."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.times = OpTimes()

    def matrix_bytes(self, rows: int, columns: int, swiglu: bool) -> int:
        return rows * columns * self.dtype.itemsize

    def plain_matrix(self, memory: Tensor, rows: int, columns: int) -> Tensor | None:
        return memory.view(self.dtype).view(rows, columns)

    def pack(
        self,
        memory: Tensor,
        rows: int,
        columns: int,
        first_row: int,
        swiglu: bool,
        source: StoredRows,
    ) -> None:
        matrix = memory.view(self.dtype).view(rows, columns)
        source.copy_to(matrix[first_row : first_row + source.n_rows])

    def linear(
        self, memory: Tensor, count: int, rows: int, columns: int, swiglu: bool
    ) -> PlainLinear:
        return PlainLinear(memory.view(self.dtype).view(count, rows, columns))

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return table[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, epsilon).to(x.dtype) * weight

    def project(self, x: Tensor, weight: Linear) -> Tensor:
        return F.linear(x, _plain(weight)[0])

    def project_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        return residual + F.linear(x, _plain(weight)[0])

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        return F.linear(x, _plain(weight)[0]).float()

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)

    def rotate_split(
        self, qkv: Tensor, positions: Tensor, table: RotaryTable, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        heads = qkv.view(len(qkv), -1, q.shape[-1])
        n_q_heads, n_kv_heads = q.shape[1], k.shape[1]
        cos = table.cos[positions].to(self.dtype).unsqueeze(1)
        sin = table.sin[positions].to(self.dtype).unsqueeze(1)
        _rotate(heads[:, :n_q_heads], cos, sin, q)
        _rotate(heads[:, n_q_heads : n_q_heads + n_kv_heads], cos, sin, k)
        v.copy_(heads[:, n_q_heads + n_kv_heads :])

    def experts_add(
        self, x: Tensor, router: Linear, gate_up: Linear, down: Linear, top_k: int, residual: Tensor
    ) -> Tensor:
        shares = F.softmax(self.project(x, router).float(), dim=-1)
        chosen_shares, chosen = torch.topk(shares, top_k, dim=-1)
        chosen_shares /= chosen_shares.sum(dim=-1, keepdim=True)
        # Rows (token, choice) sorted by expert; a stable order keeps sums in the order of experts.
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens = order // top_k
        counts = torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()
        rows = x[tokens]
        out = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(counts):
            part = slice(start, start + count)
            gate, up = F.linear(rows[part], _plain(gate_up)[expert]).chunk(2, dim=-1)
            out[part] = F.linear(F.silu(gate) * up, _plain(down)[expert])
            start += count
        weighted = (out * chosen_shares.flatten()[order].unsqueeze(1)).to(x.dtype)
        return residual + torch.zeros_like(x).index_add_(0, tokens, weighted)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Dimension i of a head turns with dimension i + dim / 2."""
    low, high = x.chunk(2, dim=-1)
    half = low.shape[-1]
    out[..., :half] = low * cos - high * sin
    out[..., half:] = high * cos + low * sin


def _plain(weight: Linear) -> Tensor:
    assert isinstance(weight, PlainLinear)
    return weight.weight
