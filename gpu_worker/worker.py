"""A worker's life: load, get a segment from the CPU worker, serve; again after a loss."""

import asyncio
import contextlib
import os

import structlog
from moelens.v1.cpu_worker_pb2_grpc import CpuWorkerStub

from gpu_worker import runtime
from gpu_worker.config import WorkerConfig
from gpu_worker.cpu_link import configure
from gpu_worker.runtime import LoadedModel
from gpu_worker.service import GpuWorkerService
from gpu_worker.weights import LoadProgress
from native.channel import ChannelError
from protos.errors import Unavailable
from protos.serving import Serving, serve
from protos.transport import peer as connect

log = structlog.get_logger("gpu_worker")

RETRY_PERIOD_S = 0.2
PROGRESS_PERIOD_S = 2.0
PEER_CHECK_PERIOD_S = 0.5
STATUS_HUNG = 70  # exit status


async def main(config: WorkerConfig) -> int:
    """Serve until a signal comes. Raises what is wrong with the checkpoint or the configuration."""
    progress = LoadProgress()
    service = GpuWorkerService(progress)
    stopping = Unavailable("the worker is stopping", reason="STOPPING")

    async def background(serving: Serving) -> None:
        try:
            await _run(config, service, progress, serving)
        finally:
            progress.stop = True
            await service.close_epoch(stopping)
            await service.close_model()

    async def drain(grace_s: float) -> None:
        service.end_session(stopping)

    return await serve([service], config.serving, background=background, drain=drain)


async def _run(
    config: WorkerConfig, service: GpuWorkerService, progress: LoadProgress, serving: Serving
) -> None:
    reporter = asyncio.create_task(_report(progress))
    try:
        model = await asyncio.to_thread(runtime.load, config, progress)
    finally:
        reporter.cancel()
    log.info(
        "model loaded",
        model=str(config.model),
        bytes=progress.total_bytes,
        bytes_per_s=round(progress.bytes_per_s),
        device=config.resolved_device,
        kv_blocks=model.kv_blocks,
    )
    service.set_model(model)
    watch = asyncio.create_task(_end_when_a_step_hangs(service))
    try:
        async with connect(config.cpu_worker, config.peer_tls) as peer:
            stub, patient = CpuWorkerStub(peer), False
            while True:
                await _serve_one_epoch(model, service, stub, serving, patient)
                patient = True
    finally:
        watch.cancel()


async def _serve_one_epoch(
    model: LoadedModel,
    service: GpuWorkerService,
    cpu_worker: CpuWorkerStub,
    serving: Serving,
    patient: bool,
) -> None:
    """From a Configure until the CPU worker is lost. `patient`: what fitted before will again."""
    answer = await configure(model, cpu_worker, patient)
    try:
        await service.open_epoch(answer.epoch, answer.segment_path)
    except (ChannelError, OSError) as error:
        log.warning("the segment cannot be opened", error=str(error))
        await asyncio.sleep(RETRY_PERIOD_S)
        return
    await serving.set_ready(True)
    log.info("ready", epoch=answer.epoch, attention_processes=answer.attention_processes)
    reason = await _until_lost(service)
    await serving.set_ready(False)
    log.warning("the CPU worker is lost", error=reason)
    await service.close_epoch(
        Unavailable(
            f"the CPU worker is lost: {reason}", reason="CPU_WORKER_LOST", retry_after_s=1.0
        )
    )


async def _until_lost(service: GpuWorkerService) -> str:
    """Look at the peers now and then: a death must be noticed while no step runs, too."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.epoch_lost.wait(), PEER_CHECK_PERIOD_S)
            return "a step failed"
        try:
            await service.check_peers()
        except ChannelError as error:
            return str(error)


async def _end_when_a_step_hangs(service: GpuWorkerService) -> None:
    """It cannot be interrupted: end this process, for a new one to take over."""
    while True:
        await asyncio.sleep(PEER_CHECK_PERIOD_S)
        if service.hangs:
            log.critical("a step hangs; this worker ends")
            os._exit(STATUS_HUNG)


async def _report(progress: LoadProgress) -> None:
    """Log how far loading is."""
    while True:
        await asyncio.sleep(PROGRESS_PERIOD_S)
        log.info(
            "loading",
            loaded_bytes=progress.loaded_bytes,
            total_bytes=progress.total_bytes,
            bytes_per_s=round(progress.bytes_per_s),
            seconds_left=round(progress.seconds_left, 1),
        )
