"""One epoch: segment, KV arena and attention processes, from Configure to its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import structlog

from cpu_worker.config import CpuWorkerConfig
from cpu_worker.memory import check_memory, find_memory
from cpu_worker.numa import Placement
from cpu_worker.processes import AttentionProcesses
from native.arena import Arena
from native.segment import (
    CONTROL,
    DEVICE,
    ChannelGeometry,
    Segment,
    arena_path,
    default_spin_s,
    participant_name,
    process_participant,
)

log = structlog.get_logger("epoch")

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
LOOK_S = 0.1


@dataclass(frozen=True)
class ProcessStats:
    """Counters of one attention process since the epoch began."""

    index: int
    pid: int
    cpu: int
    tasks: int
    busy_s: float
    alive: bool
    heartbeat_age_s: float


@dataclass(frozen=True)
class EpochStats:
    """Counters since the epoch began."""

    epoch: int
    processes: tuple[ProcessStats, ...]
    jobs: int
    kv_read_bytes: int


class Epoch:
    """A running epoch. `start` makes it, `watch` returns when it has to end, `stop` ends it."""

    def __init__(
        self, segment: Segment, arena: Arena, processes: AttentionProcesses, hung_after_s: float
    ) -> None:
        self.segment = segment
        self.processes = processes
        self.huge_pages = False
        self._arena = arena
        self._hung_after_s = hung_after_s
        self._culprit: dict[str, int] = {}

    @classmethod
    async def start(
        cls,
        config: CpuWorkerConfig,
        geometry: ChannelGeometry,
        placement: Placement,
        number: int,
        hung_after_s: float,
    ) -> Self:
        """Reserve the memory and start the processes; nothing is left behind when it fails.

        Raises InvalidArgumentError, MemoryRefused, OSError, StartFailed.
        """
        check_memory(geometry.sizes(), find_memory(config.shm_dir))
        segment = Segment.create(config.shm_dir, geometry, number)
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(segment.close)
            undo.callback(segment.unlink)
            arena = await asyncio.to_thread(_reserve, segment, placement, config.huge_pages)
            undo.callback(arena.close)
            undo.callback(arena.unlink)
            spin_s = config.spin_s
            if spin_s is None:
                spin_s = default_spin_s(geometry.n_processes)
            processes = AttentionProcesses(segment, placement, spin_s)
            undo.push_async_callback(processes.stop)
            undo.callback(segment.retire)
            await processes.start(config.start_timeout_s)
            # All who need it have it mapped; now it goes with them, however they end.
            arena.unlink()
            epoch = cls(segment, arena, processes, hung_after_s)
            epoch.huge_pages = config.huge_pages and arena.huge_page_bytes() > 0
            segment.beat(CONTROL)
            segment.publish()
            undo.pop_all()
        return epoch

    async def watch(self) -> str:
        """Show the heartbeat and look after everybody; returns why the epoch has to end."""
        attached = False
        while True:
            self.segment.beat(CONTROL)
            reason = self._fault()
            if reason:
                return reason
            device = self.has_device()
            if attached and not device:
                return f"the {participant_name(DEVICE)} has left or died"
            if device and not attached:
                attached = True
                # The name has served; without it the memory goes with its last user.
                self.segment.unlink()
                log.info("device attached", epoch=self.segment.epoch)
            await asyncio.sleep(LOOK_S)

    def has_device(self) -> bool:
        """Whether a device works with the segment now."""
        return self.segment.alive(DEVICE)

    def _fault(self) -> str:
        dead = self.processes.first_dead()
        if dead is not None:
            self._culprit = {"died": process_participant(dead)}
            return f"attention process {dead} died"
        hung = self.processes.first_hung(self._hung_after_s)
        if hung is not None:
            self._culprit = {"hung": process_participant(hung)}
            return f"attention process {hung} hangs (no heartbeat for {self._hung_after_s:g} s)"
        return ""

    def stats(self) -> EpochStats:
        """Counters of now."""
        indices = range(len(self.processes))
        return EpochStats(
            epoch=self.segment.epoch,
            processes=tuple(self._process_stats(index) for index in indices),
            jobs=self.segment.jobs,
            kv_read_bytes=sum(self.processes.state(index).kv_read_bytes for index in indices),
        )

    def _process_stats(self, index: int) -> ProcessStats:
        state = self.processes.state(index)
        return ProcessStats(
            index=index,
            pid=state.pid,
            cpu=state.cpu,
            tasks=state.tasks,
            busy_s=state.busy_s,
            alive=self.processes.alive(index),
            heartbeat_age_s=self.processes.heartbeat_age_s(index),
        )

    async def stop(self) -> EpochStats:
        """End the epoch and free everything; returns its last counters."""
        stats = self.stats()
        self.segment.retire(**self._culprit)
        await self.processes.stop()
        self._arena.unlink()
        await asyncio.to_thread(self._arena.close)
        self.segment.unlink()
        self.segment.close()
        ended = tuple(replace(process, alive=False) for process in stats.processes)
        return replace(stats, processes=ended)


def _reserve(segment: Segment, placement: Placement, huge_pages: bool) -> Arena:
    start_s = time.monotonic()
    nodes = [node.number for node in placement.nodes]
    huge = huge_pages and _huge_pages_possible()
    arena = Arena.reserve(arena_path(segment.path), segment.geometry, nodes, huge)
    log.info(
        "KV arena reserved",
        size_bytes=arena.size_bytes,
        huge_pages=huge,
        nodes=nodes,
        elapsed_s=round(time.monotonic() - start_s, 3),
    )
    return arena


def _huge_pages_possible() -> bool:
    """Whether the kernel gives huge pages to shared memory that asks for them."""
    try:
        chosen = SHMEM_HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return False
    return chosen in ("always", "within_size", "advise", "force")
