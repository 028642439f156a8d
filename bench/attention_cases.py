"""The work that bench/attention.py times: the C library, and sequences stored in an arena.

The library holds the kernels as the package has them, and the loops they are measured against
(bench/attention_baseline.c), compiled for the machine at hand.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

from native import build
from native.attention import BLOCK_TOKENS, KV_DTYPES, AttentionShape, from_bf16, to_bf16
from planner.blocks import BlockPool

BENCH = Path(__file__).parent
# ‖out − ref‖ / ‖ref‖ against float64, beyond which nothing is timed.
ERROR_LIMITS = {"fp32": 2e-6, "bf16": 4e-3, "int8": 2e-2}
POISON = {"f": np.nan, "u": 0x7FC0}  # NaN as float32 and as BF16
VALUES = 1 << 22  # random numbers that all of K and V are cut from


def widen(values: NDArray[Any]) -> NDArray[np.float64]:
    """float32 or BF16 as float64."""
    exact = values if values.dtype == np.float32 else from_bf16(values)
    return exact.astype(np.float64)


def load_library() -> tuple[FFI, Any]:
    """bench/attention_bench.c with the kernels, compiled for this run."""
    work = Path(tempfile.mkdtemp(prefix="attention-bench-"))
    flags = [flag for flag in build.FLAGS if flag != "-fvisibility=hidden"]
    include = [f"-I{build.ROOT / 'native'}", f"-I{BENCH}", "-fPIC"]
    baseline, library = work / "baseline.o", work / "bench.so"
    machine = ["-O3", "-march=native", "-ffast-math"]
    source = BENCH / "attention_baseline.c"
    subprocess.run(["gcc", *flags, *include, *machine, "-c", source, "-o", baseline], check=True)
    native = [build.ROOT / "native" / name for name in ("cpu_features.c", *build.ATTENTION_SOURCES)]
    sources = [BENCH / "attention_bench.c", baseline, *native]
    options = [*flags, *include, "-DNDEBUG", "-shared"]
    subprocess.run(["gcc", *options, *sources, "-o", library, "-lm", "-lpthread"], check=True)
    ffi = FFI()
    for header in ("cpu_features.h", "dtype.h", "attention.h", "../bench/attention_bench.c"):
        ffi.cdef(build.declarations(header))
    return ffi, ffi.dlopen(str(library))


@dataclass(frozen=True)
class Workload:
    """Sequences of equal context with `n_queries` queries each, enough for `kv_bytes` of KV."""

    shape: AttentionShape
    context: int
    kv_bytes: int
    n_queries: int = 1
    placement: str = "random"
    store: str = "nothing"

    @property
    def blocks_each(self) -> int:
        return -(-self.context // BLOCK_TOKENS)

    @property
    def n_sequences(self) -> int:
        return max(1, self.kv_bytes // (self.blocks_each * self.shape.block_bytes))

    @property
    def read_bytes(self) -> int:
        """KV that one pass over all sequences reads (whole blocks)."""
        return self.n_sequences * self.blocks_each * self.shape.block_bytes

    @property
    def flop(self) -> float:
        """Multiplications and additions of both products, causal."""
        seen = sum(range(self.context - self.n_queries + 1, self.context + 1))
        return 4.0 * self.n_sequences * self.shape.n_q_heads * self.shape.head_dim * seen


def used_pool_table(n_sequences: int, blocks_each: int, rng: np.random.Generator) -> list[int]:
    """Blocks as planner.blocks gives them out after sequences of many lengths came and went."""
    pool = BlockPool(n_sequences * blocks_each)
    living: list[list[Any]] = []
    for _ in range(8 * n_sequences):
        size = int(rng.integers(1, 2 * blocks_each))
        blocks = pool.allocate(size)
        if blocks is not None:
            living.append(blocks)
        while living and (blocks is None or pool.free_blocks < pool.total_blocks // 8):
            pool.free(living.pop(int(rng.integers(len(living)))))
            blocks = []
    table: list[int] = []
    for _ in range(n_sequences):  # one of ours for as many of theirs as it takes
        while (blocks := pool.allocate(blocks_each)) is None:
            pool.free(living.pop(int(rng.integers(len(living)))))
        table += blocks
    return table


def make_table(work: Workload, rng: np.random.Generator) -> NDArray[np.int32]:
    """Block numbers, (n_sequences, blocks each)."""
    n_blocks = work.n_sequences * work.blocks_each
    if work.placement == "pool":
        table = np.array(used_pool_table(work.n_sequences, work.blocks_each, rng), np.int32)
    elif work.placement == "random":
        table = rng.permutation(n_blocks).astype(np.int32)
    else:
        table = np.arange(n_blocks, dtype=np.int32)
    return table.reshape(work.n_sequences, work.blocks_each)


class Job:
    """A Workload in memory. `run` times it; `error` compares it with float64."""

    def __init__(self, ffi: FFI, lib: Any, work: Workload) -> None:
        rng = np.random.default_rng(work.context + work.shape.head_dim)
        self.ffi, self.lib, self.work = ffi, lib, work
        self.table = make_table(work, rng)
        shape = work.shape
        self.values = self._cast(rng.standard_normal(VALUES, dtype=np.float32))
        queries = (work.n_sequences, work.n_queries, shape.n_q_heads, shape.head_dim)
        self.q = self._cast(rng.standard_normal(queries, dtype=np.float32))
        self.out = np.full_like(self.q, POISON[self.q.dtype.kind])
        self.lse = np.full(queries[:3], np.nan, np.float32)
        self.c = ffi.new("bench_job *")
        self._fill()

    def _cast(self, values: NDArray[np.float32]) -> NDArray[Any]:
        return values if self.work.shape.kv_dtype == "fp32" else to_bf16(values)

    def _fill(self) -> None:
        work, c = self.work, self.c
        shape = work.shape
        c.shape = (shape.n_q_heads, shape.n_kv_heads, shape.head_dim, KV_DTYPES[shape.kv_dtype])
        c.arena_bytes = work.read_bytes
        c.arena_layer = self.lib.bench_allocate(work.read_bytes)
        if c.arena_layer == self.ffi.NULL:
            raise MemoryError(f"no {work.read_bytes} bytes for the arena")
        c.block_tables = self._pointer(self.table, "int32_t *")
        c.q, c.new_kv = self._pointer(self.q), self._pointer(self.values)
        c.out, c.lse = self._pointer(self.out), self._pointer(self.lse, "float *")
        c.n_sequences, c.context, c.n_queries = work.n_sequences, work.context, work.n_queries
        c.scale = work.shape.head_dim**-0.5
        c.store = getattr(self.lib, f"BENCH_STORE_{work.store.upper()}")
        for sequence in range(work.n_sequences):
            self._store(sequence)

    def _pointer(self, array: NDArray[Any], c_type: str = "void *") -> Any:
        return self.ffi.cast(c_type, array.ctypes.data)

    def _store(self, sequence: int) -> None:
        k, v = self._kv(sequence)
        shape, table = self.ffi.addressof(self.c, "shape"), self.table[sequence]
        self.lib.ml_kv_store(
            shape, self.c.arena_layer, self._pointer(table, "int32_t *"), 0, len(k),
            self._pointer(k), self._pointer(v), k[0].nbytes,
        )  # fmt: skip

    def _kv(self, sequence: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a sequence, (context, n_kv_heads, head_dim), cut from the random values."""
        shape = (self.work.context, self.work.shape.n_kv_heads, self.work.shape.head_dim)
        size = int(np.prod(shape))
        if size > VALUES:
            raise ValueError(f"context: at most {VALUES * self.work.context // size} here")
        starts = [(sequence * 977 + offset) * 16 % (VALUES - size + 1) for offset in (0, 5003)]
        k, v = (self.values[start : start + size].reshape(shape) for start in starts)
        return k, v

    def run(self, what: str, n_threads: int, cpu_time: bool) -> float:
        """Seconds of one pass; `what` is kernel, baseline or read."""
        self.c.what = getattr(self.lib, f"BENCH_{what.upper()}")
        return float(self.lib.bench_run(self.c, n_threads, cpu_time))

    def error(self) -> float:
        """Relative error of the first, middle and last sequence's output against float64."""
        self.out.fill(POISON[self.out.dtype.kind])
        self.run("kernel", 1, False)
        difference = size = 0.0
        for sequence in {0, self.work.n_sequences // 2, self.work.n_sequences - 1}:
            expected = self._expected(sequence)
            difference += float(np.square(widen(self.out[sequence]) - expected).sum())
            size += float(np.square(expected).sum())
        return float((difference / size) ** 0.5)

    def _expected(self, sequence: int) -> NDArray[np.float64]:
        q, k, v = (widen(x) for x in (self.q[sequence], *self._kv(sequence)))
        ratio = self.work.shape.n_q_heads // self.work.shape.n_kv_heads
        out = np.empty(q.shape)
        hidden = np.arange(len(k)) > len(k) - len(q) + np.arange(len(q))[:, None]
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // ratio].T * self.c.scale
            weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(1, keepdims=True)))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, head // ratio]
        return out


@contextmanager
def checked_job(ffi: FFI, lib: Any, work: Workload) -> Iterator[Job]:
    """The workload in memory, compared with float64 before it is handed out."""
    job = Job(ffi, lib, work)
    try:
        error = 0.0 if work.store != "nothing" else job.error()
        limit = ERROR_LIMITS[work.shape.kv_dtype]
        if not error < limit:
            raise AssertionError(f"relative error {error:.2e}, limit {limit:.0e}: {work}")
        yield job
    finally:
        lib.bench_free(job.c.arena_layer)
