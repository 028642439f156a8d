"""Supervised processes that die, hang, or cannot start."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.child import FIRST_DELAY_S, LONGEST_DELAY_S, Child

HUNG_AFTER_S = 2.0


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """A planner, which starts fastest."""
    socket = f"unix:{tmp_path}/planner.sock"
    made = Child(
        "planner", ["planner", "serve", "--listen", socket], socket, tmp_path / "log", HUNG_AFTER_S
    )
    yield made
    made.kill_group()


def start(child: Child) -> int:
    """Start it; the lifeline's other end is this test's to keep open. Returns its pid."""
    reading, _ = os.pipe()
    child.start({}, reading)
    assert child.process is not None
    return child.process.pid


async def until_serving(child: Child) -> None:
    while child._serving_since is None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def lost(child: Child, number: signal.Signals) -> tuple[str, float]:
    """Why it is given up after this signal, and how long that takes."""
    watch = asyncio.create_task(child.until_lost())
    await asyncio.wait_for(until_serving(child), 60)
    begin_s = time.monotonic()
    child.signal(number)
    return await asyncio.wait_for(watch, 60), time.monotonic() - begin_s


def test_process_that_is_stopped_counts_as_hung_within_the_bound(child: Child) -> None:
    start(child)
    reason, took_s = asyncio.run(lost(child, signal.SIGSTOP))
    assert "has not answered for 2 s" in reason
    assert took_s >= HUNG_AFTER_S / 2


def test_process_that_is_killed_is_noticed_at_once_and_told_apart(child: Child) -> None:
    start(child)
    reason, took_s = asyncio.run(lost(child, signal.SIGKILL))
    assert reason == f"it ended with status {-signal.SIGKILL}"
    assert took_s < HUNG_AFTER_S


def test_pause_before_a_restart_grows_with_every_start_that_fails(tmp_path: Path) -> None:
    child = Child("planner", ["planner", "--nonsense"], f"unix:{tmp_path}/s", tmp_path / "log", 1.0)
    start(child)
    asyncio.run(child.until_ended())
    delays = [child.restart_delay_s() for _ in range(12)]
    assert delays[0] == 2 * FIRST_DELAY_S
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY_S
    assert "nonsense" in child.last_words()
