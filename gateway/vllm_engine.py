"""`vllm.grpc.engine.VllmEngine` over our own service, for clients that speak it already.

Messages and stubs come from PyPI's smg-grpc-proto (extra `smg`). What this server cannot do is
refused by name: constrained output, media, KV transfer, embeddings, profiling.
"""

import asyncio
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moelens.v1 import gateway_pb2 as ours
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as theirs
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

from gateway.model import ServedModel
from gateway.service import Gateway
from gateway.vllm_messages import Answer, translated
from protos.calls import Context
from protos.errors import Unimplemented

CHUNK_BYTES = 1 << 20
# What a tokenizer is made of; nothing else of the model directory leaves the server.
TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class VllmEngine(VllmEngineServicer):  # type: ignore[misc]  # untyped package
    """See vllm_engine.proto of smg-grpc-proto for each call."""

    def __init__(self, gateway: Gateway, model: ServedModel) -> None:
        self._gateway = gateway
        self._model = model
        self._started_at = time.monotonic()
        self._last_request_s = time.time()

    async def Generate(
        self, request: theirs.GenerateRequest, context: Context
    ) -> AsyncIterator[theirs.GenerateResponse]:
        """Chunks of new ids (when streaming), one complete message for each output."""
        self._last_request_s = time.time()
        answer = Answer(request.stream)
        async for event in self._gateway.Generate(translated(request), context):
            for response in answer.take(event):
                yield response

    async def Abort(self, request: theirs.AbortRequest, context: Context) -> theirs.AbortResponse:
        """Idempotent: unknown ids are no error."""
        for request_id in request.request_ids:
            await self._gateway.Abort(ours.AbortRequest(request_id=request_id), context)
        return theirs.AbortResponse()

    async def HealthCheck(
        self, request: theirs.HealthCheckRequest, context: Context
    ) -> theirs.HealthCheckResponse:
        """Healthy while work can be taken."""
        load = await self._gateway.GetLoad(ours.GetLoadRequest(), context)
        ready = load.ready and self._model.validator is not None
        return theirs.HealthCheckResponse(healthy=ready, message="" if ready else "not ready")

    async def GetModelInfo(
        self, request: theirs.GetModelInfoRequest, context: Context
    ) -> theirs.GetModelInfoResponse:
        """What a router has to know of the model."""
        served = await self._gateway.GetModel(ours.GetModelRequest(), context)
        config = json.loads((self._model.directory / "config.json").read_text())
        return theirs.GetModelInfoResponse(
            model_path=str(self._model.directory),
            is_generation=True,
            max_context_length=served.max_context_tokens,
            vocab_size=served.vocab_size,
            served_model_name=served.model,
            tokenizer_path=str(self._model.directory),
            model_type=served.family,
            architectures=config.get("architectures") or [],
            eos_token_ids=served.eos_token_ids,
            pad_token_id=_token_id(config, "pad_token_id"),
            bos_token_id=_token_id(config, "bos_token_id"),
            max_req_input_len=served.max_context_tokens - 1,
        )

    async def GetServerInfo(
        self, request: theirs.GetServerInfoRequest, context: Context
    ) -> theirs.GetServerInfoResponse:
        """Counts and formats."""
        load = await self._gateway.GetLoad(ours.GetLoadRequest(), context)
        served = await self._gateway.GetModel(ours.GetModelRequest(), context)
        return theirs.GetServerInfoResponse(
            active_requests=load.running + load.waiting,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",  # the name of the protocol
            data_parallel_size=1,
            model_dtype=served.dtype,
        )

    async def GetLoads(
        self, request: theirs.GetLoadsRequest, context: Context
    ) -> theirs.GetLoadsResponse:
        """The one scheduler's load."""
        load = await self._gateway.GetLoad(ours.GetLoadRequest(), context)
        usage = load.kv_used_tokens / max(load.kv_capacity_tokens, 1)
        scheduler = theirs.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.kv_used_tokens,
            max_total_num_tokens=load.kv_capacity_tokens,
            token_usage=usage,
            gen_throughput=load.generated_tokens_per_s,
            utilization=usage,
        )
        return theirs.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"moe-lens {version('moe-lens')}",
            dp_rank_count=1,
            loads=[scheduler],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as a zip archive in chunks; the last one has its digest."""
        archive = await asyncio.to_thread(_tokenizer_archive, self._model.directory)
        chunks = [archive[at : at + CHUNK_BYTES] for at in range(0, len(archive), CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1
            digest = sha256(archive).hexdigest() if last else ""
            yield common_pb2.GetTokenizerChunk(data=chunk, sha256=digest)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Nothing to flush: no KV outlives its request."""
        return common_pb2.FlushCacheResponse(success=True)

    async def Embed(self, request: theirs.EmbedRequest, context: Context) -> theirs.EmbedResponse:
        """Not here."""
        raise Unimplemented("this server generates text; it has no embeddings")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Not here."""
        raise Unimplemented("use moe-lens profile")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Not here."""
        raise Unimplemented("use moe-lens profile")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> Any:
        """Not here: requests share no prefixes."""
        raise Unimplemented("this server publishes no KV events")


def _token_id(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0


def _tokenizer_archive(directory: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                archive.write(directory / name, name)
    return buffer.getvalue()
