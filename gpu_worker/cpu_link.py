"""Asking a CPU worker for a segment."""

import asyncio

import grpc
import structlog
from moelens.v1.cpu_worker_pb2 import ConfigureRequest, ConfigureResponse
from moelens.v1.cpu_worker_pb2_grpc import CpuWorkerStub

from gpu_worker.errors import CpuWorkerRefused
from gpu_worker.runtime import LoadedModel
from protos.errors import decode_failure

log = structlog.get_logger("gpu_worker")

RETRY_PERIOD_S = 0.2
CONFIGURE_TIMEOUT_S = 120.0
# Answers of the CPU worker that pass.
NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
NO_MEMORY = grpc.StatusCode.RESOURCE_EXHAUSTED


async def configure(
    model: LoadedModel, cpu_worker: CpuWorkerStub, patient: bool = False
) -> ConfigureResponse:
    """Ask until the CPU worker is there. CpuWorkerRefused where it cannot give a segment; when
    `patient` a lack of memory is waited out."""
    geometry = model.geometry
    request = ConfigureRequest(
        n_layers=geometry.n_layers,
        n_q_heads=geometry.n_q_heads,
        n_kv_heads=geometry.n_kv_heads,
        head_dim=geometry.head_dim,
        kv_dtype=geometry.kv_dtype,
        kv_blocks=geometry.kv_blocks,
        max_sequences=geometry.max_sequences,
        max_context_tokens=geometry.max_context_tokens,
        max_slot_tokens=geometry.max_slot_tokens,
        scale=geometry.scale,
        checksums=geometry.checksums,
        peer_timeout_s=model.worker.peer_timeout_s,
    )
    waiting = False
    while True:
        try:
            answer: ConfigureResponse = await cpu_worker.Configure(
                request, timeout=CONFIGURE_TIMEOUT_S
            )
            return answer
        except grpc.aio.AioRpcError as error:
            passes = error.code() in NOT_YET or (patient and error.code() is NO_MEMORY)
            if not passes:
                raise CpuWorkerRefused(decode_failure(error).message) from error
            if not waiting:
                log.info("waiting for the CPU worker", state=error.details())
            waiting = True
        await asyncio.sleep(RETRY_PERIOD_S)
