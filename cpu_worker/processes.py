"""The attention processes of one epoch: started, watched, stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from dataclasses import dataclass

from cpu_worker import attention_process
from cpu_worker.numa import Placement
from native.segment import ParticipantState, Segment, process_participant

POLL_S = 0.01
# From the epoch's end until a process that has not left by itself is killed.
LEAVE_S = 1.0


class StartFailed(Exception):
    """An attention process ended, or was not ready in time, before its epoch began."""


@dataclass
class _Watched:
    """Heartbeat seen last, and when (by this process's clock) it was seen to change."""

    heartbeat: int
    changed_s: float


class AttentionProcesses:
    """N children in the attention loop of one segment.

    `start` must be called from the main thread: the kernel kills a child when the thread that
    started it ends (see attention_process).
    """

    def __init__(self, segment: Segment, placement: Placement, spin_s: float) -> None:
        self._segment = segment
        self._placement = placement
        self._spin_s = spin_s
        self._children: list[subprocess.Popen[bytes]] = []
        self._watched: list[_Watched] = []

    def __len__(self) -> int:
        return len(self._placement.places)

    async def start(self, timeout_s: float) -> None:
        """Start all and return once all are in their loop. Raises StartFailed; call `stop` then."""
        self._children = [self._spawn(index) for index in range(len(self))]
        deadline_s = time.monotonic() + timeout_s
        for index in range(len(self)):
            await self._until_ready(index, deadline_s)
        now_s = time.monotonic()
        self._watched = [_Watched(0, now_s) for _ in self._children]

    def _spawn(self, index: int) -> subprocess.Popen[bytes]:
        command = attention_process.arguments(
            self._segment.path,
            index,
            self._placement.places[index].node_index,
            self._placement.cpus(index),
            self._spin_s,
            os.getpid(),
        )
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    async def _until_ready(self, index: int, deadline_s: float) -> None:
        while self.state(index).state == "starting":
            status = self._children[index].poll()
            if status is not None:
                raise StartFailed(
                    f"attention process {index} ended with status {status} while it started"
                )
            if time.monotonic() > deadline_s:
                raise StartFailed(f"attention process {index} did not start in time")
            await asyncio.sleep(POLL_S)

    def state(self, index: int) -> ParticipantState:
        """What a process says about itself."""
        return self._segment.state(process_participant(index))

    def alive(self, index: int) -> bool:
        """Whether the process runs."""
        return self._children[index].poll() is None

    def heartbeat_age_s(self, index: int) -> float:
        """For how long no new heartbeat has been seen; looks once."""
        watched, now_s = self._watched[index], time.monotonic()
        heartbeat = self.state(index).heartbeat
        if heartbeat != watched.heartbeat:
            watched.heartbeat, watched.changed_s = heartbeat, now_s
        return now_s - watched.changed_s

    def first_dead(self) -> int | None:
        """Index of a process that has ended, if one has."""
        return next((index for index in range(len(self)) if not self.alive(index)), None)

    def first_hung(self, bound_s: float) -> int | None:
        """Index of a process whose heartbeat has stood still for longer than the bound."""
        ages = ((index, self.heartbeat_age_s(index)) for index in range(len(self)))
        return next((index for index, age_s in ages if age_s > bound_s), None)

    def _all_gone(self) -> bool:
        return all(child.poll() is not None for child in self._children)

    async def stop(self) -> None:
        """Wait for all to leave (the epoch is retired), and kill those that do not."""
        deadline_s = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline_s and not self._all_gone():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            # A killed process may need a while to give its memory back.
            await asyncio.to_thread(child.wait)
