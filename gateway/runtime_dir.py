"""The private directory in which the services' sockets lie, and what dead launchers left of theirs.

Each holds a lock file, locked as long as its launcher lives: the kernel drops the lock however it
dies, so that no process id is ever compared, and nothing of a living launcher is touched.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "moe-lens-run-"
LOCK_NAME = "lock"


class RuntimeDirectory:
    """A directory of this process alone (mode 0700); `remove` it at the end."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = (self.path / LOCK_NAME).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Somebody may have cleaned up between the lines before; then again.
            if (self.path / LOCK_NAME).exists():
                return
            self._lock.close()

    def remove(self) -> None:
        """With everything in it. Safe to repeat."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale() -> list[Path]:
    """Remove this user's directories whose launcher is dead; returns them."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if _is_ours(path) and _is_dead(path / LOCK_NAME):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
    except OSError:
        return False


def _is_dead(lock: Path) -> bool:
    """Whether nobody holds the lock. One that is not there yet belongs to who is about to."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
