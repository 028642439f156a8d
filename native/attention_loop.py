"""What an attention process does: one call into C that returns when its epoch is over."""

from __future__ import annotations

import os
from typing import Any

from native import isa
from native._channel import ffi, lib
from native.arena import Arena
from native.segment import Segment, check_status, process_participant, status_text

# How long stores by another process may take before the job fails.
DEFAULT_STALL_S = 2.0


def run_attention_loop(
    segment: Segment,
    arena: Arena,
    index: int,
    *,
    spin_s: float,
    node: int = 0,
    cpu: int = -1,
    stall_s: float = DEFAULT_STALL_S,
) -> str:
    """Be attention process `index` of `segment` until its epoch is retired or control dies.

    Returns the reason in words. `node` is the index (not the kernel's number) of the NUMA node
    whose tasks it takes first, `cpu` the core that it is pinned to (-1: none), `spin_s` how long it
    spins for the next job before it sleeps. No Python runs meanwhile; the GIL is released.
    Raises ChannelError where that attention process exists already.
    """
    segment.participate(process_participant(index))
    options = ffi.new(
        "ml_worker_options *",
        {
            "index": index,
            "node": node,
            "cpu": cpu & 0xFFFFFFFF,
            "pid": os.getpid(),
            "spin_ns": int(spin_s * 1e9),
            "stall_ns": int(stall_s * 1e9),
        },
    )
    worker = _open(segment, arena, options)
    try:
        return status_text(lib.ml_worker_run(worker))
    finally:
        lib.ml_worker_close(worker)


def _open(segment: Segment, arena: Arena, options: Any) -> Any:
    worker = ffi.new("ml_worker **")
    check_status(lib.ml_worker_open(segment.handle, arena.address, options, worker), segment.path)
    return worker[0]


def instruction_set() -> str:
    """Name of the instruction set that the attention loop uses."""
    return isa.selected(lib)
