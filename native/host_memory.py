"""Host memory's read bandwidth, and copies paced as if over a link."""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from native.arrays import ITEM_BYTES, Array, as_array
from native.errors import InvalidArgumentError
from native.threads import ThreadPool, ffi, lib, pool_pointer

DEFAULT_PIECE_BYTES = 1 << 20


def read_bandwidth_bytes_per_s(
    *, size_bytes: int = 1 << 29, repeats: int = 5, pool: ThreadPool | None = None
) -> float:
    """Median rate at which the pool's threads read `size_bytes` of memory in sequence.

    The memory (huge pages where allowed) is written first and freed afterwards; it should be
    several times the last-level cache.

    Raises InvalidArgumentError where size_bytes or repeats is below 1.
    """
    if size_bytes < 1 or repeats < 1:
        raise InvalidArgumentError(f"size_bytes, repeats: ({size_bytes}, {repeats}) below 1")
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    data[:] = 1
    address = ffi.cast("void *", as_array(data, "memory").address)
    seconds = [
        float(lib.ml_read_seconds(pool_pointer(pool), address, size_bytes))
        for _ in range(repeats + 1)
    ]
    return size_bytes / statistics.median(seconds[1:])


@dataclass
class EmulatedLink:
    """A link of `bytes_per_s` (0: as fast as memory) over which packets go one after the other.

    Not for two threads at once. A copy costs little CPU time: between pieces of `piece_bytes` the
    thread sleeps, without the GIL.
    """

    bytes_per_s: float
    piece_bytes: int = DEFAULT_PIECE_BYTES
    free_at_ns: int = 0

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= 0:
            raise InvalidArgumentError(f"bytes_per_s: {self.bytes_per_s} is negative")
        if self.piece_bytes < 1:
            raise InvalidArgumentError(f"piece_bytes: {self.piece_bytes} is below 1")

    def copy(self, to: Any, source: Any, *, ready_ns: int = 0) -> float:
        """Copies `source` to `to` (as many bytes, both without gaps) and returns when the last one
        has arrived: seconds the packet was on the link.

        ready_ns (time.monotonic_ns): when the packet was queued, by default now; a packet that was
        ready when its predecessor ended follows it without a pause.
        """
        target, data = as_array(to, "to"), as_array(source, "source")
        size_bytes = _gapless_bytes(data, "source")
        if _gapless_bytes(target, "to") != size_bytes:
            raise InvalidArgumentError(f"to: must be {size_bytes} bytes as the source is")
        ready_ns = ready_ns or time.monotonic_ns()
        call = ffi.new("ml_paced_copy_call *")
        call.to, call.size_bytes = ffi.cast("void *", target.address), size_bytes
        setattr(call, "from", ffi.cast("void *", data.address))
        call.piece_bytes, call.bytes_per_s = self.piece_bytes, self.bytes_per_s
        call.ready_ns, call.link_free_ns = ready_ns, self.free_at_ns
        start_ns = max(ready_ns, self.free_at_ns)
        self.free_at_ns = int(lib.ml_paced_copy(call))
        return (self.free_at_ns - start_ns) * 1e-9


def _gapless_bytes(array: Array, name: str) -> int:
    row_bytes = array.n_columns * ITEM_BYTES[array.dtype]
    if array.n_rows > 1 and array.stride_bytes != row_bytes:
        raise InvalidArgumentError(f"{name}: rows must lie without gaps")
    return array.n_rows * row_bytes
