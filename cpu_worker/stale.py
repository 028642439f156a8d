"""Files that dead CPU workers left in the shared-memory directory.

A segment's owner holds a lock on it that the kernel drops when the process dies, so that no pid is
ever compared and nothing of a living owner, in whatever container, is touched.
"""

from __future__ import annotations

from pathlib import Path

from native.segment import ARENA_SUFFIX, SEGMENT_PREFIX, SEGMENT_SUFFIX, is_owned


def remove_stale(shm_dir: Path) -> list[Path]:
    """Remove segments and arenas whose owner is dead; returns what was removed."""
    removed = []
    for segment in sorted(shm_dir.glob(f"{SEGMENT_PREFIX}*{SEGMENT_SUFFIX}")):
        with is_owned(segment) as owned:
            if owned is False:
                removed += _remove(segment.with_suffix(ARENA_SUFFIX)) + _remove(segment)
    for arena in sorted(shm_dir.glob(f"{SEGMENT_PREFIX}*{ARENA_SUFFIX}")):
        # An owner makes the arena after the segment and removes it before.
        if not arena.with_suffix(SEGMENT_SUFFIX).exists():
            removed += _remove(arena)
    return removed


def _remove(path: Path) -> list[Path]:
    try:
        path.unlink()
    except OSError:
        return []
    return [path]
