"""The connection to the GPU worker: waiting for it, and what it says of itself."""

import asyncio
import time
from dataclasses import dataclass

import grpc
import structlog
from moelens.v1 import gpu_worker_pb2 as messages
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub

from planner.spec import ModelSpec
from protos.errors import decode_failure

log = structlog.get_logger("worker")

RETRY_PERIOD_S = 0.2
CALL_TIMEOUT_S = 5.0
# What a worker answers while it cannot take work yet.
NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class WorkerInfo:
    """What the engine has to know of a GPU worker."""

    model_name: str
    model_config_json: str
    dtype: str
    kv_dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    block_tokens: int
    kv_blocks: int
    max_step_tokens: int
    max_sequences: int
    preferred_step_tokens: int
    hardware_spec_json: str
    schedule: str
    resident_share: float

    @classmethod
    def from_message(cls, message: messages.GetInfoResponse) -> "WorkerInfo":
        """Raises ValueError naming the limit that a worker left out."""
        info = cls(**{name: getattr(message, name) for name in cls.__dataclass_fields__})
        for name in ("vocab_size", "max_context_tokens", "block_tokens", "kv_blocks"):
            if getattr(info, name) < 1:
                raise ValueError(f"the GPU worker reports {name} 0")
        return info

    @property
    def geometry(self) -> tuple[int, ...]:
        """What pool and scheduler are built from."""
        return (
            self.block_tokens,
            self.kv_blocks,
            self.max_step_tokens,
            self.preferred_step_tokens,
            self.max_sequences,
        )

    @property
    def streams_weights(self) -> bool:
        """Whether there is a link at all; without one the device computes where weights lie."""
        return self.device == "cuda" or self.resident_share < 1

    def stored(self, model: ModelSpec) -> ModelSpec:
        """The model in the formats in which this worker keeps weights and KV."""
        return model.with_formats(weights=self.dtype, kv=self.kv_dtype)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.kv_blocks * self.block_tokens

    @property
    def context_tokens(self) -> int:
        """The longest sequence: what the model takes, if the KV cache holds so much."""
        return min(self.max_context_tokens, self.kv_capacity_tokens)


async def wait_for_worker(stub: GpuWorkerStub, patience_s: float | None = None) -> WorkerInfo:
    """Ask until the worker has loaded its model; log its progress meanwhile.

    Raises TimeoutError when for `patience_s` nobody answered who had loaded more of the model than
    anybody before: a worker that dies again and again while it loads makes no progress.
    """
    last = ""
    furthest, moved_at = 0.0, time.monotonic()
    while True:
        try:
            answer = await stub.GetInfo(messages.GetInfoRequest(), timeout=CALL_TIMEOUT_S)
            return WorkerInfo.from_message(answer)
        except grpc.aio.AioRpcError as error:
            if error.code() not in NOT_YET:
                raise
            loaded, state = _progress(error)
        if state != last:
            log.info("waiting for the GPU worker", state=state)
            last = state
        if loaded > furthest:
            furthest, moved_at = loaded, time.monotonic()
        if patience_s is not None and time.monotonic() - moved_at > patience_s:
            raise TimeoutError(f"no GPU worker for {patience_s:.0f} s: {state}")
        await asyncio.sleep(RETRY_PERIOD_S)


def _progress(error: grpc.aio.AioRpcError) -> tuple[float, str]:
    """The share that is loaded, and how that is said."""
    failure = decode_failure(error)
    progress = messages.LoadProgress()
    for detail in failure.details:
        if detail.Unpack(progress) and progress.total_bytes:
            share = progress.loaded_bytes / progress.total_bytes
            return share, f"loading, {share:.0%}"
    return 0.0, failure.message or failure.code.name
