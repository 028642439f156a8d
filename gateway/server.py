"""The gateway's process: engine, admission and public service put together."""

import grpc
import structlog
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub

from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.engine import Engine
from gateway.metrics import Metrics
from gateway.model import ServedModel
from gateway.service import Gateway
from protos.errors import Unavailable
from protos.serving import Serving, serve
from protos.transport import channel

log = structlog.get_logger("gateway")


class GatewayServer:
    """Everything one gateway holds. Raises when the model's files are unusable."""

    def __init__(self, config: GatewayConfig, worker_channel: grpc.aio.Channel) -> None:
        self.config = config
        self.metrics = Metrics()
        self.model = ServedModel(config.model, config.served_model, config.limits)
        self.admission = Admission(config.max_waiting_requests)
        self.engine = Engine(
            GpuWorkerStub(worker_channel), config.engine, self.metrics, self.model.adopt
        )
        self.service = Gateway(self.model, self.engine, self.admission, self.metrics)

    async def background(self, serving: Serving) -> None:
        """Drive the engine; ready while it has a session with the worker."""
        await self.engine.run(serving.set_ready)

    async def drain(self, grace_s: float) -> None:
        """Let running requests end; `serve` bounds the time."""
        await self.engine.until_idle()


async def serve_gateway(config: GatewayConfig) -> int:
    """Serve until a signal comes; returns the exit status."""
    async with channel(config.gpu_worker) as worker_channel:
        server = GatewayServer(config, worker_channel)
        try:
            return await serve(
                [server.service],
                config.serving,
                background=server.background,
                drain=server.drain,
            )
        finally:
            server.engine.fail_all(Unavailable("this server has stopped", reason="STOPPING"))
