"""The thread pool: it starts late, sleeps when idle, survives fork, serves several callers."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from native import layer_ops
from native.errors import InvalidArgumentError
from native.threads import MAX_THREADS, ThreadPool

X = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
EXPECTED = X.argmax(dim=1)


def works(pool: ThreadPool) -> bool:
    out = torch.full((len(X),), -1)
    layer_ops.argmax(X, out, pool=pool)
    return torch.equal(out, EXPECTED)


def test_threads_start_with_the_first_operation() -> None:
    with ThreadPool(3) as pool:
        assert pool.n_started == 0
        assert works(pool)
        assert pool.n_started == 2


def test_every_thread_count_gives_the_result() -> None:
    with ThreadPool(1) as pool:
        for n_threads in (1, 4, 2, 7, 3):
            pool.resize(n_threads)
            assert pool.n_threads == n_threads
            assert all(works(pool) for _ in range(20))


def test_a_forked_child_starts_its_own_threads() -> None:
    with ThreadPool(2) as pool:
        assert works(pool)
        child = os.fork()
        if not child:
            os._exit(0 if pool.n_started == 0 and works(pool) and pool.n_started == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert works(pool)


def test_a_child_forked_during_an_operation_is_not_stuck() -> None:
    stop = threading.Event()
    with ThreadPool(2) as pool:

        def keep_busy() -> None:
            while not stop.is_set():
                assert works(pool)

        busy = threading.Thread(target=keep_busy)
        busy.start()
        for _ in range(5):
            child = os.fork()
            if not child:
                os._exit(0 if works(pool) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        busy.join()


def test_idle_threads_sleep() -> None:
    with ThreadPool(4, spin_s=1e-3) as pool:
        assert works(pool)
        time.sleep(0.05)
        before_s = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before_s < 0.03


def test_operations_from_several_threads_do_not_mix() -> None:
    failures = []
    with ThreadPool(3) as pool:

        def run() -> None:
            failures.extend(i for i in range(100) if not works(pool))

        callers = [threading.Thread(target=run) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not failures


def test_a_sleeping_pool_wakes_for_every_operation() -> None:
    with ThreadPool(2, spin_s=0) as pool:
        assert all(works(pool) for _ in range(500))


def test_other_python_threads_run_meanwhile() -> None:
    big, out = torch.randn(200, 100_000), torch.zeros(200, dtype=torch.int64)
    ticks = 0
    done = threading.Event()

    def operate() -> None:
        for _ in range(30):
            layer_ops.argmax(big, out)
        done.set()

    operating = threading.Thread(target=operate)
    operating.start()
    while not done.is_set():
        ticks += 1
        time.sleep(0.001)
    operating.join()
    assert ticks > 3


def test_a_closed_pool_and_wrong_sizes_are_refused() -> None:
    pool = ThreadPool(2)
    pool.close()
    pool.close()
    with pytest.raises(InvalidArgumentError, match="pool: is closed"):
        works(pool)
    for n_threads in (0, MAX_THREADS + 1):
        with pytest.raises(InvalidArgumentError, match=f"n_threads: {n_threads} is not between"):
            ThreadPool(n_threads)
    with pytest.raises(InvalidArgumentError, match="spin_s"):
        ThreadPool(2, spin_s=-1)


def test_the_default_is_the_cores_this_process_may_use() -> None:
    with ThreadPool() as pool:
        assert pool.n_threads == len(os.sched_getaffinity(0))
