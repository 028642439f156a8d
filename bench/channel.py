"""The channel's own cost: post → wait round trips, and attention through it beside its busy time.

    python bench/channel.py [--processes 1 2] [--spin-us 0 2 50] [--rounds N] [--json FILE]

Round trip: a job that stores and attends to a single token, over `DevicePort` as the GPU worker
uses it. Batch: decode of many sequences in the shape of Mixtral-8x7B's layers; its outputs are
compared with the same job on one process before anything is timed. Every figure is a median of
alternating repetitions. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from cpu_worker import attention_process, numa
from native.arena import Arena
from native.channel import ITEM_DTYPE, DevicePort
from native.segment import (
    CONTROL,
    MAX_NODES,
    ChannelGeometry,
    Segment,
    arena_path,
    process_participant,
)

SMALL = ChannelGeometry(1, 1, 1, 16, "bf16", 64, 4, 512, 16, 1, 0.25)
MIXTRAL_LAYER = ChannelGeometry(2, 32, 8, 128, "bf16", 64 * 64, 64, 1024, 64, 1, 128**-0.5)
SEQUENCES, CONTEXT_TOKENS = 64, 1000
BATCH_ROUNDS = 15


@dataclass(frozen=True)
class RoundTrip:
    """Post → wait of the smallest job."""

    processes: int
    spin_us: float
    median_us: float
    p99_us: float
    jobs_per_s: float


@dataclass(frozen=True)
class Batch:
    """One layer's decode attention of the whole batch."""

    processes: int
    elapsed_us: float
    busy_share: float  # busy time of all processes / (elapsed time * processes)
    kv_bytes_per_s: float


@contextmanager
def running(geometry: ChannelGeometry, spin_s: float) -> Iterator[DevicePort]:
    """A port with attention processes, placed as the CPU worker places them."""
    placement = numa.place(numa.read_nodes(), geometry.n_processes, True, MAX_NODES)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        segment = Segment.create(Path(name), geometry, 1)
        arena = Arena.reserve(arena_path(segment.path), geometry, [0], huge_pages=True)
        stop = threading.Event()
        beating = threading.Thread(target=beat, args=(segment, stop))
        beating.start()
        children = [
            subprocess.Popen(
                attention_process.arguments(
                    segment.path, i, 0, placement.cpus(i), spin_s, os.getpid()
                )
            )
            for i in range(geometry.n_processes)
        ]
        participants = [process_participant(i) for i in range(geometry.n_processes)]
        while any(segment.state(who).state == "starting" for who in participants):
            time.sleep(0.01)
        segment.publish()
        try:
            with DevicePort(segment.path, spin_s=spin_s) as port:
                yield port
        finally:
            stop.set()
            beating.join()
            segment.retire()
            for child in children:
                child.wait()
            arena.close()
            segment.close()


def beat(segment: Segment, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        segment.beat(CONTROL)


def round_trip(processes: int, spin_us: float, rounds: int) -> RoundTrip:
    geometry = replace(SMALL, n_processes=processes)
    with running(geometry, spin_us / 1e6) as port:
        port.set_blocks(0, 0, [0])
        port.prepare(0, np.array([(0, 0, 1, 0, 0)], ITEM_DTYPE))
        times_s = []
        start_s = time.perf_counter()
        for _ in range(rounds):
            posted_s = time.perf_counter()
            port.post(0, 0)
            port.wait(0, timeout_s=10)
            times_s.append(time.perf_counter() - posted_s)
        elapsed_s = time.perf_counter() - start_s
    microseconds = np.array(times_s) * 1e6
    return RoundTrip(
        processes,
        spin_us,
        float(np.median(microseconds)),
        float(np.quantile(microseconds, 0.99)),
        rounds / elapsed_s,
    )


def fill_batch(port: DevicePort) -> None:
    """Random KV of every sequence but its last token, then the decode job's inputs."""
    rng = np.random.default_rng(0)

    def bf16(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape, dtype=np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    slot_tokens = port.geometry.max_slot_tokens
    blocks = rng.permutation(port.geometry.kv_blocks)
    for row in range(SEQUENCES):
        port.set_blocks(row, 0, blocks[row * 64 : row * 64 + 64])
        for start in range(0, CONTEXT_TOKENS - 1, slot_tokens):
            n_tokens = min(slot_tokens, CONTEXT_TOKENS - 1 - start)
            for view in (port.q(0), port.k(0), port.v(0)):
                view[:n_tokens] = bf16((n_tokens, *view.shape[1:]))
            port.prepare(0, np.array([(row, start, n_tokens, 0, 1)], ITEM_DTYPE))
            port.post(0, 0)
            port.wait(0, timeout_s=60)
    for view in (port.q(0), port.k(0), port.v(0)):
        view[:SEQUENCES] = bf16((SEQUENCES, *view.shape[1:]))
    rows = [(row, CONTEXT_TOKENS - 1, 1, row, 0) for row in range(SEQUENCES)]
    port.prepare(0, np.array(rows, ITEM_DTYPE))


def batch(processes: int, spin_us: float) -> tuple[Batch, np.ndarray]:
    geometry = replace(MIXTRAL_LAYER, n_processes=processes)
    with running(geometry, spin_us / 1e6) as port:
        fill_batch(port)
        runs = []
        for _ in range(BATCH_ROUNDS):
            port.post(0, 0)
            runs.append(port.wait(0, timeout_s=60))
        out = port.out(0)[:SEQUENCES].copy()
    elapsed_s = statistics.median(run.elapsed_s for run in runs)
    share = statistics.median(run.busy_s / run.elapsed_s / processes for run in runs)
    return Batch(processes, elapsed_s * 1e6, share, runs[0].kv_read_bytes / elapsed_s), out


def main() -> None:
    """Compare, then print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--spin-us", type=float, nargs="+", default=[0, 2, 50])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trips = [
        round_trip(processes, spin_us, options.rounds)
        for processes in options.processes
        for spin_us in options.spin_us
    ]
    print("processes  spin µs  round trip µs (median, p99)    jobs/s")
    for trip in trips:
        print(
            f"{trip.processes:9d}  {trip.spin_us:7.0f}  {trip.median_us:13.1f} {trip.p99_us:13.1f}"
            f"  {trip.jobs_per_s:8.0f}"
        )
    expected = None
    batches = []
    print(
        f"\n{SEQUENCES} sequences of {CONTEXT_TOKENS} tokens, 32 heads over 8 KV heads of 128, BF16"
    )
    print("processes  elapsed µs  busy share  KV GB/s")
    for processes in options.processes:
        measured, out = batch(processes, 2)
        expected = out if expected is None else expected
        if not np.array_equal(out, expected):
            raise SystemExit(f"{processes} processes give another result than the first")
        batches.append(measured)
        print(
            f"{processes:9d}  {measured.elapsed_us:10.0f}  {measured.busy_share:10.2f}"
            f"  {measured.kv_bytes_per_s / 1e9:7.2f}"
        )
    if options.json:
        found = {"round_trips": trips, "batches": batches}
        rows = {name: [asdict(row) for row in part] for name, part in found.items()}
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
