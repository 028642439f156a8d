"""The thread pool that the CPU device's operations run on."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from native import isa
from native.errors import InvalidArgumentError, NotBuiltError

try:
    from native._gemm import ffi as ffi
    from native._gemm import lib as lib
except ImportError as error:
    raise NotBuiltError("_gemm") from error

isa.apply(lib)

MAX_THREADS: int = lib.ML_POOL_MAX_THREADS
DEFAULT_SPIN_S = 50e-6


class ThreadPool:
    """Threads for the operations of `native`: they start with the first one that needs them, spin
    for `spin_s` when there is nothing to do and then sleep. Operations of one pool run one after
    the other; a forked child starts threads of its own.

    n_threads: the calling thread included; by default the cores this process may run on.
    Raises InvalidArgumentError where n_threads or spin_s is out of range.
    """

    def __init__(self, n_threads: int | None = None, *, spin_s: float = DEFAULT_SPIN_S) -> None:
        n_threads = len(os.sched_getaffinity(0)) if n_threads is None else n_threads
        _check_threads(n_threads)
        if not 0 <= spin_s <= 1:
            raise InvalidArgumentError(f"spin_s: {spin_s} is not between 0 and 1")
        self._pool: Any = lib.ml_pool_create(n_threads, int(spin_s * 1e9))
        if self._pool == ffi.NULL:
            raise MemoryError("thread pool")

    @property
    def pointer(self) -> Any:
        """The `ml_pool *`. Raises InvalidArgumentError where the pool is closed."""
        if self._pool is None:
            raise InvalidArgumentError("pool: is closed")
        return self._pool

    @property
    def n_threads(self) -> int:
        """Threads of an operation, the caller's included."""
        return int(lib.ml_pool_threads(self.pointer))

    @property
    def n_started(self) -> int:
        """Threads that exist beside the caller: 0 before the first operation."""
        return int(lib.ml_pool_threads_started(self.pointer))

    def resize(self, n_threads: int) -> None:
        """Use this many threads from the next operation on; waits for the one that runs."""
        _check_threads(n_threads)
        lib.ml_pool_resize(self.pointer, n_threads)

    def close(self) -> None:
        """End the threads. No operation may be running."""
        if self._pool is not None:
            lib.ml_pool_destroy(self._pool)
            self._pool = None

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_threads(n_threads: int) -> None:
    if not 1 <= n_threads <= MAX_THREADS:
        raise InvalidArgumentError(f"n_threads: {n_threads} is not between 1 and {MAX_THREADS}")


_default: ThreadPool | None = None
_default_lock = threading.Lock()


def default_pool() -> ThreadPool:
    """The pool that operations use when none is given: all cores of this process."""
    global _default
    with _default_lock:
        if _default is None:
            _default = ThreadPool()
        return _default


def pool_pointer(pool: ThreadPool | None) -> Any:
    """The `ml_pool *` of `pool`, or of the default pool."""
    return (pool or default_pool()).pointer
