"""How much memory there is, and exact allocations from it."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_worker.errors import MemoryShortage

PAGE_BYTES = mmap.PAGESIZE
# Kept free for the interpreter, torch, the gateway and the page cache's needs.
HEADROOM_BYTES = 1_000_000_000


def div_ceil(numerator: int, denominator: int) -> int:
    """The least integer that is at least numerator / denominator."""
    return -(-numerator // denominator)


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def available_bytes() -> int:
    """Host memory that can be allocated now: the kernel's estimate, within the cgroup's limit."""
    limits = [_meminfo_bytes("MemAvailable")]
    cgroup = Path("/sys/fs/cgroup")
    limit = _cgroup_bytes(cgroup / "memory.max")
    used = _cgroup_bytes(cgroup / "memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used)
    return max(0, min(limits))


def free_shared_bytes(directory: Path) -> int:
    """Free space of the file system that a shared-memory directory is on."""
    import os

    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def require(what: str, items_bytes: Sequence[tuple[str, int]]) -> None:
    """MemoryShortage, itemised, where the items do not fit into the memory that is there."""
    items = [*items_bytes, ("headroom", HEADROOM_BYTES)]
    available = available_bytes()
    if sum(n for _, n in items) > available:
        raise MemoryShortage(what, items, available)


def allocate(n_bytes: int) -> torch.Tensor:
    """Private zeroed pages, exactly `n_bytes` rounded up to a page, huge pages advised (uint8)."""
    pages = mmap.mmap(
        -1, round_up(max(n_bytes, 1), PAGE_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(pages, dtype=torch.uint8)


def _meminfo_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":", 1)
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {field}")


def _cgroup_bytes(file: Path) -> int | None:
    """A cgroup v2 value; None where there is no such file or no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
