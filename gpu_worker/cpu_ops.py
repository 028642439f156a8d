"""The operations of device `cpu`, by our own kernels: packed weights, threads that sleep, and rows
whose results do not depend on their neighbours, to the bit."""

import threading
import time
from dataclasses import dataclass

import torch

from gpu_worker.checkpoint import StoredRows
from gpu_worker.ops import Linear, RotaryTable
from gpu_worker.timing import OpTimes
from native import gemm, layer_ops, moe
from native.threads import ThreadPool

Tensor = torch.Tensor

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class PackedLinear:
    """Packed matrices of one shape."""

    group: gemm.WeightGroup
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.group), self.rows, self.columns

    @property
    def weight(self) -> gemm.PackedWeight:
        """The only matrix."""
        return self.group.weights[0]


class _OwnPool(threading.local):
    """A pool of one for each thread: loading threads pack beside each other, not in turn."""

    def __init__(self) -> None:
        self.pool = ThreadPool(1)


class CpuOps:
    """`Ops` over native.gemm. Intermediate results live in buffers that are kept: a result is valid
    until the same operation is called again. For one thread at a time; packing may go on in others.
    """

    def __init__(self, dtype: torch.dtype, pool: ThreadPool | None = None) -> None:
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._name = DTYPE_NAMES[dtype]
        self._pool = pool
        self._packing = _OwnPool()
        self._workspace = moe.Workspace()
        self._buffers: dict[str, Tensor] = {}
        self.times = OpTimes()

    # -- weights --------------------------------------------------------------------------------

    def matrix_bytes(self, rows: int, columns: int, swiglu: bool) -> int:
        n = rows // 2 if swiglu else rows
        return gemm.packed_size_bytes(n, columns, self._name, pair=swiglu)

    def plain_matrix(self, memory: Tensor, rows: int, columns: int) -> Tensor | None:
        return None

    def pack(
        self,
        memory: Tensor,
        rows: int,
        columns: int,
        first_row: int,
        swiglu: bool,
        source: StoredRows,
    ) -> None:
        weight = self._weight(memory, rows, columns, swiglu)
        role = "plain"
        if swiglu:
            role = "gate" if first_row < weight.n else "up"
            first_row -= 0 if role == "gate" else weight.n
        stored_dtype = DTYPE_NAMES.get(source.tensor.dtype)
        if stored_dtype is None:  # FP16
            for first, piece in source.pieces():
                begin = first_row + first
                gemm.pack(
                    weight, piece.float(), first_row=begin, role=role, pool=self._packing.pool
                )
            return
        try:
            gemm.pack_file(
                weight,
                source.descriptor,
                source.tensor.offset_bytes,
                source.n_rows,
                stored_dtype,
                source.scratch,
                first_row=first_row,
                role=role,
                pool=self._packing.pool,
            )
        except EOFError as error:
            raise source.too_short() from error

    def linear(
        self, memory: Tensor, count: int, rows: int, columns: int, swiglu: bool
    ) -> PackedLinear:
        n_bytes = self.matrix_bytes(rows, columns, swiglu)
        parts = [memory[i * n_bytes : (i + 1) * n_bytes] for i in range(count)]
        weights = [self._weight(part, rows, columns, swiglu) for part in parts]
        return PackedLinear(gemm.WeightGroup(weights), rows, columns)

    def _weight(self, memory: Tensor, rows: int, columns: int, swiglu: bool) -> gemm.PackedWeight:
        n = rows // 2 if swiglu else rows
        return gemm.PackedWeight(memory.data_ptr(), n, columns, self._name, swiglu, owner=memory)

    # -- activations ----------------------------------------------------------------------------

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        x = torch.empty(len(token_ids), table.shape[1], dtype=self.dtype)
        layer_ops.gather_rows(table, token_ids, x, pool=self._pool)
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = self._buffer("normed", *x.shape)
        layer_ops.rms_norm(x, weight, out, eps=epsilon, pool=self._pool)
        return out

    def project(self, x: Tensor, weight: Linear) -> Tensor:
        packed = _packed(weight)
        out = self._buffer("projected", len(x), packed.rows)
        self._multiply(x, packed, out)
        return out

    def project_add(self, x: Tensor, weight: Linear, residual: Tensor) -> Tensor:
        self._multiply(x, _packed(weight), residual, residual)
        return residual

    def logits(self, x: Tensor, weight: Linear) -> Tensor:
        packed = _packed(weight)
        out = self._buffer("logits", len(x), packed.rows, torch.float32)
        self._multiply(x, packed, out)
        return out

    def _multiply(
        self, x: Tensor, weight: PackedLinear, out: Tensor, residual: Tensor | None = None
    ) -> None:
        begin_s = time.perf_counter()
        gemm.linear(x, weight.group, out, residual=residual, pool=self._pool)
        self.times.gemm_s += time.perf_counter() - begin_s

    def argmax(self, logits: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        layer_ops.argmax(logits, out, pool=self._pool)
        return out

    def rotate_split(
        self, qkv: Tensor, positions: Tensor, table: RotaryTable, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        layer_ops.rotary(
            qkv,
            positions,
            table.cos,
            table.sin,
            q,
            k,
            v,
            n_q_heads=q.shape[1],
            n_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            pool=self._pool,
        )

    def experts_add(
        self, x: Tensor, router: Linear, gate_up: Linear, down: Linear, top_k: int, residual: Tensor
    ) -> Tensor:
        weights = moe.MoeWeights(
            _packed(router).weight, _packed(gate_up).group, _packed(down).group, top_k
        )
        spent = moe.moe(
            x, weights, residual, residual=residual, workspace=self._workspace, pool=self._pool
        )
        self.times.gemm_s += spent.gate_up_s + spent.down_s
        self.times.routing_s += spent.route_s + spent.combine_s
        return residual

    def _buffer(
        self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Kept memory of (rows, columns); what was in it is lost."""
        needed = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < needed:
            buffer = self._buffers[name] = torch.empty(needed, dtype=dtype or self.dtype)
        return buffer[:needed].view(rows, columns)


def _packed(weight: Linear) -> PackedLinear:
    assert isinstance(weight, PackedLinear)
    return weight
