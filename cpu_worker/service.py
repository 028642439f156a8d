"""The gRPC service of the CPU worker: it makes one epoch at a time, watches and ends it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeAlias

import grpc
import structlog
from moelens.v1 import cpu_worker_pb2, cpu_worker_pb2_grpc

from cpu_worker import numa
from cpu_worker.config import CpuWorkerConfig
from cpu_worker.epoch import Epoch, EpochStats
from cpu_worker.memory import MemoryRefused, file_system
from cpu_worker.processes import StartFailed
from cpu_worker.stale import remove_stale
from native.attention_loop import instruction_set
from native.errors import InvalidArgumentError
from native.segment import MAX_NODES, ChannelGeometry
from protos import errors
from protos.serving import Serving

log = structlog.get_logger("cpu_worker")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
NOT_CONFIGURED = "the CPU worker has no epoch: call Configure first"
GEOMETRY_FIELDS = (
    "n_layers",
    "n_q_heads",
    "n_kv_heads",
    "head_dim",
    "kv_dtype",
    "kv_blocks",
    "max_sequences",
    "max_context_tokens",
    "max_slot_tokens",
    "scale",
    "checksums",
)


class CpuWorkerService(cpu_worker_pb2_grpc.CpuWorkerServicer):
    """Holds at most one epoch. Its methods run on one event loop, in the main thread."""

    def __init__(self, config: CpuWorkerConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()  # one Configure or end at a time
        self._epoch: Epoch | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_stats: EpochStats | None = None
        self._number = 0
        nodes = numa.read_nodes()
        n_processes = config.attention_processes or numa.default_processes(nodes)
        self.placement = numa.place(nodes, n_processes, config.pin, MAX_NODES)

    async def background(self, serving: Serving) -> None:
        """Clean up after dead predecessors, then be ready; for `protos.serving.serve`."""
        for path in await asyncio.to_thread(remove_stale, self._config.shm_dir):
            log.warning("removed what a dead CPU worker left", path=str(path))
        kind = file_system(self._config.shm_dir)
        if kind not in ("tmpfs", "hugetlbfs", ""):
            log.warning(
                "shm_dir is not in memory: the KV cache would be written to disk",
                shm_dir=str(self._config.shm_dir),
                file_system=kind,
            )
        await serving.set_ready(True)
        await asyncio.Event().wait()

    async def drain(self, grace_s: float) -> None:
        """Give the device time to leave, then end the epoch."""
        if self._watch is not None and self._epoch is not None and self._epoch.has_device():
            await asyncio.wait([self._watch], timeout=grace_s)
        await self.close()

    async def close(self) -> None:
        """End the epoch, if there is one; all its memory is free afterwards."""
        async with self._lock:
            await self._end("the CPU worker stops")

    async def Configure(
        self, request: cpu_worker_pb2.ConfigureRequest, context: Context
    ) -> cpu_worker_pb2.ConfigureResponse:
        """See cpu_worker.proto."""
        geometry = self._geometry(request)
        hung_after_s = self._hung_after_s(request.peer_timeout_s)
        # Shielded: a caller that leaves in the middle must not leave half an epoch behind. It calls
        # again, and gets a new one.
        work = asyncio.create_task(self._configure(geometry, hung_after_s))
        epoch = await asyncio.shield(work)
        sizes = geometry.sizes()
        return cpu_worker_pb2.ConfigureResponse(
            segment_path=str(epoch.segment.path),
            epoch=epoch.segment.epoch,
            attention_processes=len(epoch.processes),
            instruction_set=instruction_set(),
            segment_bytes=sizes.segment_bytes,
            kv_arena_bytes=sizes.kv_arena_bytes,
            numa_nodes=len(self.placement.nodes),
            huge_pages=epoch.huge_pages,
        )

    def _geometry(self, request: cpu_worker_pb2.ConfigureRequest) -> ChannelGeometry:
        geometry = ChannelGeometry(
            **{name: getattr(request, name) for name in GEOMETRY_FIELDS},
            n_processes=len(self.placement.places),
            n_nodes=len(self.placement.nodes),
        )
        try:
            geometry.check()
        except InvalidArgumentError as error:
            field, _, message = str(error).partition(": ")
            raise errors.InvalidArgument(message, field=field) from error
        return geometry

    def _hung_after_s(self, peer_timeout_s: float) -> float:
        if peer_timeout_s == 0:
            return self._config.hung_after_s
        if not 0.5 <= peer_timeout_s <= 3600:
            raise errors.InvalidArgument(
                f"{peer_timeout_s} is neither 0 (default) nor between 0.5 and 3600 s",
                field="peer_timeout_s",
            )
        return peer_timeout_s

    async def _configure(self, geometry: ChannelGeometry, hung_after_s: float) -> Epoch:
        async with self._lock:
            await self._end("a new Configure takes its place")
            # Grows over restarts too, as long as the clock does; the file's name has a random part.
            self._number = max(self._number + 1, time.time_ns() // 1_000_000)
            try:
                epoch = await Epoch.start(
                    self._config, geometry, self.placement, self._number, hung_after_s
                )
            except MemoryRefused as error:
                raise errors.ResourceExhausted(str(error), reason="MEMORY") from error
            except OSError as error:
                raise errors.ResourceExhausted(
                    f"memory in {self._config.shm_dir} could not be reserved: {error}",
                    reason="MEMORY",
                ) from error
            except StartFailed as error:
                raise errors.Unavailable(str(error), reason="ATTENTION_PROCESS") from error
            self._epoch, self._last_stats = epoch, None
            self._watch = asyncio.create_task(self._look_after(epoch))
            log.info(
                "epoch began",
                epoch=epoch.segment.epoch,
                attention_processes=len(epoch.processes),
                instruction_set=instruction_set(),
                huge_pages=epoch.huge_pages,
            )
            return epoch

    async def _look_after(self, epoch: Epoch) -> None:
        reason = await epoch.watch()
        async with self._lock:
            if self._epoch is epoch:
                # This task is the watch that _end would cancel.
                self._watch = None
                await self._end(reason)

    async def _end(self, reason: str) -> None:
        """End the present epoch; the lock is held."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            number = epoch.segment.epoch
            self._last_stats = epoch.stats()  # until all have left
            self._last_stats = await epoch.stop()
            log.info("epoch ended", epoch=number, reason=reason)

    async def Stats(
        self, request: cpu_worker_pb2.StatsRequest, context: Context
    ) -> cpu_worker_pb2.StatsResponse:
        """See cpu_worker.proto."""
        stats = self._epoch.stats() if self._epoch is not None else self._last_stats
        if stats is None:
            raise errors.FailedPrecondition(NOT_CONFIGURED)
        return _stats_response(stats)


def _stats_response(stats: EpochStats) -> cpu_worker_pb2.StatsResponse:
    return cpu_worker_pb2.StatsResponse(
        epoch=stats.epoch,
        processes=[
            cpu_worker_pb2.AttentionProcessStats(
                index=process.index,
                pid=process.pid,
                cpu=process.cpu,
                tasks=process.tasks,
                busy_s=process.busy_s,
                alive=process.alive,
                heartbeat_age_s=process.heartbeat_age_s,
            )
            for process in stats.processes
        ],
        jobs=stats.jobs,
        kv_read_bytes=stats.kv_read_bytes,
    )
