"""Attention kernels beside the machine's memory and the loops they replace: compare, then time.

    python bench/attention.py [--kv-gb 1.0] [--threads N ...] [--suite NAME ...] [--clock cpu]
                              [--repetitions 7] [--json FILE]

Each line is one workload: KV in huge pages, blocks at random, one query per sequence. Its outputs
are first compared with float64; then a read of the same memory and the kernel alternate, and the
medians of their rates and of the ratio within each repetition are printed. `--clock cpu` counts
the threads' own time, for a machine where others compute as well. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attention_cases import Job, Workload, checked_job, load_library

from native import isa
from native.attention import BLOCK_TOKENS, AttentionShape

# 4 query heads to each of 8 KV heads of 128 in BF16: Mixtral's.
MIXTRAL = AttentionShape(32, 8, 128, "bf16")
TORCH_BATCH_KV_BYTES = 256 << 20


@dataclass(frozen=True)
class Result:
    """Medians of one workload. Rates are of KV bytes, the same for all columns."""

    suite: str
    what: str
    isa: str
    threads: int
    context: int
    heads: str
    kv_dtype: str
    kernel_gb_per_s: float
    read_gb_per_s: float
    of_read: float  # median of the ratios within each repetition
    kv_tokens_per_s: float
    of_other: float | None = None  # kernel's rate over that of what the suite compares with


def suites(kv_bytes: int, all_threads: list[int]) -> dict[str, list[tuple[Workload, list[int]]]]:
    """Workloads and the numbers of threads to run each with, by the suite's name."""
    base = Workload(MIXTRAL, 512, kv_bytes)
    shapes = {
        "ratio": [AttentionShape(8 * ratio, 8, 128, "bf16") for ratio in (1, 2, 4, 8, 16)],
        "head_size": [AttentionShape(32, 8, size, "bf16") for size in (64, 80, 96, 128, 192, 256)],
        "dtype": [AttentionShape(32, 8, 128, dtype) for dtype in ("bf16", "fp32", "int8")],
    }
    contexts = (64, 128, 256, 512, 1024, 2048, 4096)
    result = {
        "context": [(replace(base, context=n), all_threads) for n in contexts],
        "placement": [
            (replace(base, placement=place), all_threads)
            for place in ("sequential", "pool", "random")
        ],
        "store": [
            (replace(base, context=n - 12, store=store), [1])
            for n in (128, 512)
            for store in ("nothing", "before", "on_the_way")
        ],
    }
    for name, listed in shapes.items():
        result[name] = [(replace(base, shape=shape), all_threads) for shape in listed]
    return result


class Bench:
    """Times workloads with one library, clock and number of repetitions."""

    def __init__(self, repetitions: int, cpu_time: bool) -> None:
        self.ffi, self.lib = load_library()
        self.repetitions, self.cpu_time = repetitions, cpu_time

    def rates(self, job: Job, others: list[str], threads: int) -> dict[str, list[float]]:
        """KV bytes/s by repetition, the kernel's and each other's, in turn."""
        names = [*others, "kernel"]
        rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(self.repetitions):
            for name in names:
                seconds = job.run(name, threads, self.cpu_time)
                rates[name].append(job.work.read_bytes / seconds)
        return rates

    def result(self, suite: str, job: Job, threads: int, other: str | None = None) -> Result:
        rates = self.rates(job, ["read", *([other] if other else [])], threads)
        shape = job.work.shape

        def ratio(to: str) -> float:
            pairs = zip(rates["kernel"], rates[to], strict=True)
            return statistics.median(a / b for a, b in pairs)

        return Result(
            suite=suite,
            what=f"{job.work.placement}, store {job.work.store}",
            isa=isa.selected(self.lib),
            threads=threads,
            context=job.work.context,
            heads=f"{shape.n_q_heads}/{shape.n_kv_heads}x{shape.head_dim}",
            kv_dtype=shape.kv_dtype,
            kernel_gb_per_s=statistics.median(rates["kernel"]) / 1e9,
            read_gb_per_s=statistics.median(rates["read"]) / 1e9,
            of_read=ratio("read"),
            kv_tokens_per_s=statistics.median(rates["kernel"]) / shape.block_bytes * BLOCK_TOKENS,
            of_other=ratio(other) if other else None,
        )

    def run_suite(self, name: str, entries: list[tuple[Workload, list[int]]]) -> Iterator[Result]:
        for work, thread_counts in entries:
            with checked_job(self.ffi, self.lib, work) as job:
                for threads in thread_counts:
                    yield self.result(name, job, threads)

    def instruction_sets(self, kv_bytes: int) -> Iterator[Result]:
        """Each instruction set against the loop that the compiler vectorised, on one core."""
        for shape in (MIXTRAL, AttentionShape(32, 32, 128, "bf16")):
            for name in isa.supported(self.lib):
                isa.select(self.lib, name)
                with checked_job(self.ffi, self.lib, Workload(shape, 512, kv_bytes // 4)) as job:
                    yield self.result("isa (other: compiler's loop)", job, 1, "baseline")

    def torch_sdpa(self, threads: int) -> Iterator[Result]:
        """Against torch's scaled_dot_product_attention over contiguous K and V, all cores."""
        for context in (128, 512, 2048):
            work = Workload(MIXTRAL, context, TORCH_BATCH_KV_BYTES)
            seconds = torch_seconds(work, threads, 3, self.clock())
            with checked_job(self.ffi, self.lib, work) as job:
                result = self.result("torch (other: torch's SDPA)", job, threads)
            torch_gb_per_s = work.read_bytes / seconds / 1e9
            yield replace(result, of_other=result.kernel_gb_per_s / torch_gb_per_s)

    def clock(self) -> Callable[[], float]:
        return time.process_time if self.cpu_time else time.perf_counter

    def prefill(self) -> Iterator[tuple[str, float, float]]:
        """Name, GFLOP/s and share of torch's large BF16 product, on one core."""
        clock = time.thread_time if self.cpu_time else time.perf_counter
        for context, n_queries in ((926, 926), (1024, 128), (4096, 512), (512, 16)):
            work = Workload(MIXTRAL, context, 1 << 26, n_queries=n_queries)
            with checked_job(self.ffi, self.lib, work) as job:
                rates, shares = [], []
                for _ in range(self.repetitions):
                    product = matmul_flop_per_s(clock)
                    rates.append(work.flop / job.run("kernel", 1, self.cpu_time))
                    shares.append(rates[-1] / product)
            name = f"{n_queries} queries at the end of {context}"
            yield name, statistics.median(rates) / 1e9, statistics.median(shares)


def torch_seconds(
    work: Workload, threads: int, repetitions: int, clock: Callable[[], float]
) -> float:
    """Median of torch's SDPA on the workload's sizes (with process time: a thread's share)."""
    import torch

    torch.set_num_threads(threads)
    shape = work.shape
    kv = (work.n_sequences, shape.n_kv_heads, work.context, shape.head_dim)
    k, v = (torch.randn(kv, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(work.n_sequences, shape.n_q_heads, 1, shape.head_dim, dtype=torch.bfloat16)
    times = []
    for _ in range(repetitions):
        start = clock()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        times.append(clock() - start)
    seconds = statistics.median(times)
    return seconds / threads if clock is time.process_time else seconds


def matmul_flop_per_s(clock: Callable[[], float]) -> float:
    """torch's BF16 linear, 512 rows by 4096x4096, on one thread."""
    import torch

    torch.set_num_threads(1)
    rows, weight = (torch.ones(n, 4096, dtype=torch.bfloat16) for n in (512, 4096))
    torch.nn.functional.linear(rows[:8], weight)
    start = clock()
    torch.nn.functional.linear(rows, weight)
    return 2.0 * 512 * 4096 * 4096 / (clock() - start)


def print_result(result: Result) -> None:
    other = "" if result.of_other is None else f"  {result.of_other:6.1f} x other"
    print(
        f"{result.suite:<30} {result.isa:<12} {result.threads:>2} threads  context "
        f"{result.context:>5}  {result.heads:>10} {result.kv_dtype}  {result.what:<26} "
        f"{result.kernel_gb_per_s:6.1f} of {result.read_gb_per_s:6.1f} GB/s = "
        f"{result.of_read:5.2f} {result.kv_tokens_per_s / 1e6:6.2f} M tokens/s{other}",
        flush=True,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    names = ["context", "placement", "store", "ratio", "head_size", "dtype", "isa", "torch"]
    names.append("prefill")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kv-gb", type=float, default=1.0, help="KV of each workload")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--suite", nargs="+", choices=names, default=names)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all results there")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the suites asked for."""
    options = parse(arguments)
    bench = Bench(options.repetitions, options.clock == "cpu")
    kv_bytes = int(options.kv_gb * 1e9)
    plain = suites(kv_bytes, options.threads)
    results: list[Result] = []
    prefill: list[tuple[str, float, float]] = []
    for name in options.suite:
        if name == "prefill":
            for prefill_result in bench.prefill():
                print(
                    "prefill: {}: {:.0f} GFLOP/s, {:.2f} of torch's product".format(*prefill_result)
                )
                prefill.append(prefill_result)
            continue
        found = {
            "isa": lambda: bench.instruction_sets(kv_bytes),
            "torch": lambda: bench.torch_sdpa(max(options.threads)),
        }.get(name, lambda name=name: bench.run_suite(name, plain[name]))  # type: ignore[misc]
        for result in found():
            print_result(result)
            results.append(result)
    if options.json:
        report = {"results": [asdict(result) for result in results], "prefill": prefill}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
