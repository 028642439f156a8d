"""Matrix products of the CPU device beside torch (oneDNN): compare, then time.

    python bench/gemm.py [--threads N] [--shape NxK ...] [--rows M ...] [--json FILE]

Weights are as many copies as exceed the caches, taken in turn, as a model's layers are. Ours,
torch's, the register-only peak and the read of the same weights alternate within each repetition;
medians and ratios of one run are what counts. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from native import gemm
from native.threads import ThreadPool, ffi, lib

SHAPES = (
    "1536x1024",
    "1024x1024",
    "3584x1024",
    "1024x1792",
    "32000x1024",
    "14336x4096",
    "4096x14336",
)
ROWS = (1, 8, 32, 128, 512, 2048)
PEAK_ROUNDS = 200_000  # about 1.3 ms
COPIES_BYTES = 192 << 20
MIN_REPETITIONS = 7
MAX_RELATIVE_ERROR = 3e-3


@dataclass(frozen=True)
class Timing:
    """One shape: m rows, weight (n, k); medians in one run."""

    m: int
    n: int
    k: int
    gflop_per_s: float
    torch_gflop_per_s: float
    of_peak: float  # share of the register-only rate of all threads
    of_read: float  # weight bytes/s, share of the read benchmark on the same weights
    speedup: float  # torch's time over ours, median of the repetitions' ratios


def peak_function() -> Callable[[int], float]:
    """bench/gemm_peak.c, compiled for this run."""
    source = Path(__file__).with_name("gemm_peak.c")
    library = Path(tempfile.mkdtemp()) / "gemm_peak.so"
    command = ["gcc", "-O3", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).bf16_flop_per_s
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_uint64]
    return function


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """By `clock`, of one call."""
    start = clock()
    run()
    return clock() - start


def all_cores_peak(peak: Callable[[int], float], n_threads: int) -> float:
    """Register-only FLOP/s of `n_threads` threads at the same time."""
    with ThreadPoolExecutor(n_threads) as threads:
        return sum(threads.map(peak, [PEAK_ROUNDS] * n_threads))


class Bench:
    """Times one weight shape for several numbers of rows."""

    def __init__(self, n: int, k: int, pool: ThreadPool, peak: Callable[[int], float]) -> None:
        self.n, self.k, self.pool, self.peak = n, k, pool, peak
        copies = max(1, COPIES_BYTES // (n * k * 2))
        self.plain = [torch.randn(n, k).bfloat16() for _ in range(copies)]
        self.packed = [gemm.allocate(n, k, "bf16") for _ in range(copies)]
        for weight, source in zip(self.packed, self.plain, strict=True):
            gemm.pack(weight, source, pool=pool)
        self.turn = 0
        # A single thread's own time leaves out what others on the machine take.
        self.clock = time.thread_time if pool.n_threads == 1 else time.perf_counter

    def ours(self, a: torch.Tensor, out: torch.Tensor) -> None:
        self.turn = (self.turn + 1) % len(self.packed)
        gemm.linear(a, self.packed[self.turn], out, pool=self.pool)

    def theirs(self, a: torch.Tensor) -> torch.Tensor:
        self.turn = (self.turn + 1) % len(self.plain)
        return torch.nn.functional.linear(a, self.plain[self.turn])

    def read(self) -> None:
        """Reads the next packed weight, as the benchmark of memory does."""
        self.turn = (self.turn + 1) % len(self.packed)
        weight = self.packed[self.turn]
        address = ffi.cast("void *", weight.address)
        lib.ml_read_seconds(self.pool.pointer, address, weight.size_bytes)

    def compare(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """Raises SystemExit unless ours agrees with float64 on the first weight's product."""
        out.fill_(float("nan"))
        gemm.linear(a, self.packed[0], out, pool=self.pool)
        reference = a[:64].double() @ self.plain[0].double().T
        error = float((out[:64] - reference).norm() / reference.norm())
        if not error < MAX_RELATIVE_ERROR:
            raise SystemExit(f"({a.shape[0]}, {self.n}, {self.k}): relative error {error}")

    def measure(self, m: int, budget_s: float) -> Timing:
        """Compares, then times for about `budget_s`."""
        a, out = torch.randn(m, self.k).bfloat16(), torch.empty(m, self.n, dtype=torch.bfloat16)
        self.compare(a, out)
        rows: list[tuple[float, float, float, float]] = []
        started = time.perf_counter()
        while len(rows) < MIN_REPETITIONS or time.perf_counter() - started < budget_s:
            rows.append(
                (
                    seconds(lambda: self.ours(a, out), self.clock),
                    seconds(lambda: self.theirs(a), self.clock),
                    seconds(self.read, self.clock),
                    all_cores_peak(self.peak, self.pool.n_threads),
                )
            )
        ours, theirs, read, peak = (statistics.median(column) for column in zip(*rows, strict=True))
        flop = 2 * m * self.n * self.k
        return Timing(
            m,
            self.n,
            self.k,
            gflop_per_s=flop / ours * 1e-9,
            torch_gflop_per_s=flop / theirs * 1e-9,
            of_peak=statistics.median(flop / row[0] / row[3] for row in rows) if peak else 0.0,
            of_read=read / ours,
            speedup=statistics.median(row[1] / row[0] for row in rows),
        )


def main() -> None:
    """Prints a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--shape", nargs="*", default=SHAPES, help="NxK of the weight")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    pool, peak, timings = ThreadPool(options.threads), peak_function(), []
    torch.set_num_threads(pool.n_threads)
    print(f"{gemm.selected_isa()}, {pool.n_threads} threads")
    print("     m      n      k  GFLOP/s   torch  speedup  of peak  of read")
    for shape in options.shape:
        n, k = map(int, shape.split("x"))
        bench = Bench(n, k, pool, peak)
        for m in options.rows:
            with torch.inference_mode():
                t = bench.measure(m, options.seconds)
            timings.append(t)
            print(
                f"{m:6} {n:6} {k:6} {t.gflop_per_s:8.1f} {t.torch_gflop_per_s:7.1f} "
                f"{t.speedup:8.2f} {t.of_peak:8.1%} {t.of_read:8.1%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1))


if __name__ == "__main__":
    main()
