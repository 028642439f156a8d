"""The data mover: a thread that keeps the next streamed stage's weights coming.

Two buffers on the device. Positions count streamed stages since the start, over all passes:

    released ≤ acquired ≤ released + 1      the device uses one stage at a time
    acquired ≤ loaded ≤ released + 2        position p lies in buffer p mod 2

A pass ends where the next one begins, so the first stages of the next step are already there.
"""

import threading
import time
from dataclasses import dataclass

import torch

from gpu_worker.device import Device, Fence
from gpu_worker.options import DEFAULT_PACKET_BYTES
from gpu_worker.residency import BUFFERS, Residency
from gpu_worker.timing import Timeline
from gpu_worker.weights import BlockWeights, HostStore

# A stage goes in so many packets at least: small copies wait for one packet, and a stage has
# several of them.
MIN_PACKETS = 16
# Below this a packet's fixed cost would show.
SMALLEST_PACKET_BYTES = 1_000_000


@dataclass(frozen=True)
class MoverStats:
    """Totals since the start."""

    busy_s: float = 0.0
    moved_bytes: int = 0


class Mover:
    """`StageWeights` over a link. Use as a context manager, or call `close`."""

    def __init__(
        self,
        store: HostStore,
        device: Device,
        residency: Residency,
        packet_bytes: int = DEFAULT_PACKET_BYTES,
        timeline: Timeline | None = None,
    ) -> None:
        assert device.link is not None
        self._store = store
        self._device = device
        self._link = device.link
        self._order = residency.streamed
        shortest_bytes = max(SMALLEST_PACKET_BYTES, residency.buffer_bytes // MIN_PACKETS)
        self._packet_bytes = min(packet_bytes, shortest_bytes)
        self._timeline = timeline
        self.base = BlockWeights(store.base, self._on_device(store.base_bytes()), device.ops)
        self._resident = {
            stage: BlockWeights(block, self._on_device(store.stage_bytes(stage)), device.ops)
            for stage, block in enumerate(store.stages)
            if stage not in residency.streamed
        }
        n_buffers = BUFFERS if residency.streamed else 0
        self._buffers = [device.allocate(residency.buffer_bytes) for _ in range(n_buffers)]
        self._bound: dict[tuple[int, int], BlockWeights] = {}
        self._changed = threading.Condition()
        self._loaded = self._acquired = self._released = 0
        self._fences: dict[int, Fence] = {}
        self._stats = MoverStats()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="data mover", daemon=True)
        if self._order:
            self._thread.start()

    # -- the engine's side ---------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The next stage acquired is the first; forget a pass that was not finished."""
        if not self._order:
            return
        with self._changed:
            unfinished = self._acquired % len(self._order)
            if unfinished:
                self._acquired += len(self._order) - unfinished
            if self._released < self._acquired:
                self._let_go(self._acquired)

    def acquire(self, stage: int) -> BlockWeights:
        """The stage's weights, once they have arrived."""
        if stage in self._resident:
            return self._resident[stage]
        with self._changed:
            position = self._acquired
            expected = self._order[position % len(self._order)]
            assert stage == expected, f"stage {stage} asked for, {expected} is next"
            self._changed.wait_for(lambda: self._loaded > position or self._failure)
            if self._failure is not None:
                raise RuntimeError("the data mover has failed") from self._failure
            self._acquired = position + 1
        return self._bind(position % BUFFERS, stage)

    def release(self, stage: int) -> None:
        """The device's queued work is the last that uses the stage."""
        if stage in self._resident:
            return
        with self._changed:
            self._let_go(self._acquired)

    def stats(self) -> MoverStats:
        """What has been moved so far."""
        with self._changed:
            return self._stats

    def close(self) -> None:
        """End the thread; a packet on its way arrives first."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> "Mover":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_go(self, position: int) -> None:
        """All positions before `position` may be overwritten once the device is done."""
        fence = self._device.fence()
        for done in range(self._released, position):
            self._fences[done] = fence
        self._released = position
        self._changed.notify_all()

    def _bind(self, buffer: int, stage: int) -> BlockWeights:
        key = (buffer, stage)
        if key not in self._bound:
            block = self._store.stages[stage]
            where = self._buffers[buffer][: block.n_bytes]
            self._bound[key] = BlockWeights(block, where, self._device.ops)
        return self._bound[key]

    def _on_device(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in device memory; where that is the host's, the store itself."""
        if self._device.ops.device.type == "cpu":
            return source
        return source.to(self._device.ops.device)

    # -- the mover's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            position = 0
            while (position := self._wait_for_room(position)) >= 0:
                fence = self._fences.pop(position - BUFFERS, None)
                if fence is not None:
                    fence()
                self._load(position)
                position += 1
                with self._changed:
                    self._loaded = max(self._loaded, position)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_room(self, position: int) -> int:
        """The next position to load (later than asked where a pass was given up); -1: close."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or position < self._released + BUFFERS)
            if self._closing:
                return -1
            for skipped in range(position, self._released):
                self._fences.pop(skipped - BUFFERS, None)
            return max(position, self._released)

    def _load(self, position: int) -> None:
        stage = self._order[position % len(self._order)]
        source = self._store.stage_bytes(stage)
        buffer = self._buffers[position % BUFFERS]
        ready_ns = time.monotonic_ns()
        for start in range(0, len(source), self._packet_bytes):
            packet = source[start : start + self._packet_bytes]
            where = buffer[start : start + len(packet)]
            busy_s = self._link.send_packet(where, packet, ready_ns)
            self._count(stage, len(packet), busy_s)
            if self._closing or position < self._released:
                return

    def _count(self, stage: int, n_bytes: int, busy_s: float) -> None:
        stats = self._stats
        with self._changed:
            self._stats = MoverStats(stats.busy_s + busy_s, stats.moved_bytes + n_bytes)
        if self._timeline is not None:
            end_s = time.perf_counter()
            self._timeline.add("link", f"weights {stage}", end_s - busy_s, end_s)
