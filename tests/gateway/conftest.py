"""A whole gateway in this process, in front of a worker without a model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayStub, add_GatewayServicer_to_server

from gateway.config import GatewayConfig
from gateway.pacing import EngineConfig
from gateway.server import GatewayServer
from protos.calls import Calls
from protos.serving import ServingConfig
from protos.transport import channel
from tests.gateway.fakes import FakeWorker, serving


@dataclass
class House:
    """A gateway, its worker, and a client of it."""

    gateway: GatewayServer
    worker: FakeWorker
    stub: GatewayStub
    ready: list[bool]

    async def collect(self, request: messages.GenerateRequest, **call: object) -> "Answer":
        """Everything that one call streams."""
        answer = Answer()
        async for event in self.stub.Generate(request, **call):
            answer.add(event)
        return answer

    async def tokens(self, prompt: list[int], max_tokens: int, seed: int = 0) -> list[int]:
        """Generated ids for a prompt of ids."""
        request = messages.GenerateRequest(
            token_ids=messages.TokenIds(ids=prompt), max_tokens=max_tokens
        )
        request.sampling.seed = seed
        return (await self.collect(request)).token_ids(0)

    def check_all_free(self) -> None:
        """No block in use, no sequence known, no plan that the worker found wrong."""
        scheduler = self.gateway.engine.scheduler
        scheduler.check_integrity()
        assert self.worker.problem == ""
        assert scheduler.pool.used_blocks == 0
        assert (scheduler.running, scheduler.waiting) == (0, 0)
        assert self.gateway.engine.load().outstanding_tokens == 0


class Answer:
    """The events of one stream, by kind."""

    def __init__(self) -> None:
        self.events: list[messages.GenerateResponse] = []

    def add(self, event: messages.GenerateResponse) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list:  # type: ignore[type-arg]
        return [getattr(e, kind) for e in self.events if e.WhichOneof("event") == kind]

    def token_ids(self, index: int = 0) -> list[int]:
        return [i for t in self.of("tokens") if t.index == index for i in t.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(t.text for t in self.of("tokens") if t.index == index)

    def finished(self, index: int = 0) -> messages.Finished:
        (finished,) = [f for f in self.of("finished") if f.index == index]
        return finished


MakeHouse = Callable[..., AbstractAsyncContextManager[House]]


@pytest.fixture
def house(tmp_path: Path, demo_model: Path) -> MakeHouse:
    """`async with house(worker, engine=EngineConfig(...)) as h`."""

    @contextlib.asynccontextmanager
    async def make(
        worker: FakeWorker | None = None,
        engine: EngineConfig | None = None,
        **settings: object,
    ) -> AsyncIterator[House]:
        worker = worker or FakeWorker()
        worker_address = f"unix:{tmp_path}/worker.sock"
        config = GatewayConfig(
            serving=ServingConfig("gateway", f"unix:{tmp_path}/gateway.sock"),
            model=demo_model,
            gpu_worker=worker_address,
            planner=f"unix:{tmp_path}/planner.sock",
            engine=engine or EngineConfig(retry_period_s=0.01),
        )
        config = replace(config, **settings)
        ready: list[bool] = []
        became_ready = asyncio.Event()

        async def on_ready(value: bool) -> None:
            ready.append(value)
            became_ready.set()

        async with (
            serving(worker, worker_address),
            channel(worker_address) as peer,
            channel(config.planner) as nobody,
        ):
            gateway = GatewayServer(config, peer, nobody)
            server = grpc.aio.server(interceptors=[Calls(["moelens.v1.Gateway"])])
            add_GatewayServicer_to_server(gateway.service, server)
            server.add_insecure_port(config.serving.listen)
            await server.start()
            engine_task = asyncio.create_task(gateway.engine.run(on_ready))
            try:
                await asyncio.wait(
                    [engine_task, asyncio.ensure_future(became_ready.wait())],
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=10,
                )
                if engine_task.done():
                    engine_task.result()
                async with channel(config.serving.listen) as client:
                    yield House(gateway, worker, GatewayStub(client), ready)
            finally:
                engine_task.cancel()
                await asyncio.wait([engine_task])
                await server.stop(0)

    return make
