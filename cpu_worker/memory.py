"""What memory there is, and whether what is asked for fits: looked at before anything is taken."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from native.segment import SegmentSizes

GIB = 2**30
# Left to everything else on the machine.
RAM_HEADROOM_BYTES = 256 * 2**20


@dataclass(frozen=True)
class MemoryFound:
    """Bytes that can be taken now, and where the smallest bound comes from."""

    ram_available_bytes: int
    ram_bound: str  # "MemAvailable" or "the cgroup's memory limit"
    shm_free_bytes: int
    shm_dir: Path


class MemoryRefused(Exception):
    """What is asked for does not fit. The text itemises need and find."""


def find_memory(
    shm_dir: Path, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MemoryFound:
    """Look at RAM, the cgroup (v2) and the file system of shm_dir. Raises OSError."""
    ram, bound = _mem_available_bytes(proc), "MemAvailable"
    limit = _cgroup_left_bytes(cgroup)
    if limit is not None and limit < ram:
        ram, bound = limit, "the cgroup's memory limit"
    shm = os.statvfs(shm_dir)
    return MemoryFound(ram, bound, shm.f_bavail * shm.f_frsize, shm_dir)


def file_system(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system that `directory` is on ("tmpfs", ...), "" where it is unknown."""
    target, best, found = directory.resolve(), -1, ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4])
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), rest.split()[0]
    return found


def check_memory(sizes: SegmentSizes, found: MemoryFound) -> None:
    """Raises MemoryRefused, itemised, where RAM or the shared-memory directory is too small."""
    shm_need = sizes.segment_bytes + sizes.kv_arena_bytes
    ram_need = shm_need + sizes.scratch_bytes
    problems = []
    if shm_need > found.shm_free_bytes:
        problems.append(
            f"{found.shm_dir} has {gib(found.shm_free_bytes)} free, {gib(shm_need)} are needed "
            "(make it larger, e.g. Docker's shm_size, or name another with --shm-dir)"
        )
    if ram_need + RAM_HEADROOM_BYTES > found.ram_available_bytes:
        problems.append(
            f"{gib(found.ram_available_bytes)} of RAM can be had ({found.ram_bound}), "
            f"{gib(ram_need)} and {gib(RAM_HEADROOM_BYTES)} of headroom are needed"
        )
    if problems:
        raise MemoryRefused(f"{'; '.join(problems)}. Needed: {itemise(sizes)}")


def itemise(sizes: SegmentSizes) -> str:
    """The parts of the need, in words."""
    rest = sizes.segment_bytes - sizes.block_table_bytes - sizes.activation_bytes
    parts = {
        "KV cache": sizes.kv_arena_bytes,
        "activation slots": sizes.activation_bytes,
        "block tables": sizes.block_table_bytes,
        "task words and partial results": rest,
        "scratch of the attention processes": sizes.scratch_bytes,
    }
    return ", ".join(f"{name} {gib(size_bytes)}" for name, size_bytes in parts.items())


def gib(size_bytes: int) -> str:
    """A size for people."""
    if size_bytes < GIB:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def _mem_available_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{proc}/meminfo has no MemAvailable line")


def _cgroup_left_bytes(cgroup: Path) -> int | None:
    """What the cgroup leaves; its page cache counts as free, since it is given back. None: no
    limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return max(0, int(limit) - used + reclaimable)
    except (OSError, ValueError):
        return None
