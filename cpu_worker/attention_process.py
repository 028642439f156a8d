"""One attention process: `python -m cpu_worker.attention_process SEGMENT INDEX ...`.

Started by cpu_worker.processes alone. It opens the segment, pins itself and stays in one C call
until its epoch is retired or its parent dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from native.arena import Arena
from native.attention_loop import run_attention_loop
from native.segment import Segment, arena_path, die_with_parent


def arguments(
    segment: Path, index: int, node: int, cpus: Sequence[int], spin_s: float, parent_pid: int
) -> list[str]:
    """The command line of one attention process, bound to `cpus` (none: not bound)."""
    allowed = ",".join(str(cpu) for cpu in cpus) or "any"
    return [
        sys.executable,
        "-m",
        "cpu_worker.attention_process",
        str(segment),
        *(str(value) for value in (index, node, allowed, spin_s, parent_pid)),
    ]


def _cpus(text: str) -> list[int]:
    return [] if text == "any" else [int(cpu) for cpu in text.split(",")]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attention_process", description=__doc__)
    parser.add_argument("segment", type=Path)
    parser.add_argument("index", type=int)
    parser.add_argument("node", type=int, help="index of the NUMA node among those in use")
    parser.add_argument("cpus", type=_cpus, help="cores to be bound to: 0,1,... or any")
    parser.add_argument("spin_s", type=float)
    parser.add_argument("parent_pid", type=int)
    return parser.parse_args(argv)


def _tie_to_parent(parent_pid: int) -> None:
    die_with_parent(signal.SIGKILL)
    # It may have died before the line above.
    if os.getppid() != parent_pid:
        raise SystemExit("the control process is gone")


def main(argv: list[str]) -> int:
    """Run until the epoch is over; 0 unless something went wrong at the start."""
    options = _parse(argv)
    _tie_to_parent(options.parent_pid)
    # Ctrl-C goes to the whole terminal group; when to stop is the control process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.cpus:
        os.sched_setaffinity(0, options.cpus)
    with Segment.open(options.segment) as segment:
        arena_file = arena_path(options.segment)
        with Arena.open(arena_file, segment.geometry) as arena:
            run_attention_loop(
                segment,
                arena,
                options.index,
                node=options.node,
                cpu=options.cpus[0] if len(options.cpus) == 1 else -1,
                spin_s=options.spin_s,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
