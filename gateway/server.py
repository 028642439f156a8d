"""The gateway's process: engine, admission and public service put together."""

import asyncio
import importlib.util

import grpc
import structlog
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub
from moelens.v1.planner_pb2_grpc import PlannerStub

from gateway.admission import Admission, Plan
from gateway.config import GatewayConfig
from gateway.engine import Engine
from gateway.forecast import Forecast
from gateway.kserve import InferenceService
from gateway.metrics import Metrics, metrics_server
from gateway.model import ServedModel
from gateway.readiness import Readiness
from gateway.service import Gateway
from gateway.step_log import StepLog
from gateway.tracing import tracing
from gateway.worker import WorkerInfo
from protos.errors import Unavailable
from protos.serving import Serving, serve
from protos.transport import peer

log = structlog.get_logger("gateway")


class GatewayServer:
    """Everything one gateway holds. Raises when the model's files are unusable."""

    def __init__(
        self,
        config: GatewayConfig,
        worker_channel: grpc.aio.Channel,
        planner_channel: grpc.aio.Channel,
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.model = ServedModel(config.model, config.served_model, config.limits)
        planner = PlannerStub(planner_channel)
        self.admission = Admission(planner, config.max_waiting_requests)
        self.forecast = Forecast(planner, self.model.spec)
        self.engine = Engine(
            GpuWorkerStub(worker_channel), config.engine, self.metrics, self._adopt
        )
        if config.step_log is not None:
            self.engine.observe = StepLog(config.step_log)
        self.metrics.watch(self.engine.current_scheduler, lambda: self.admission.plan)
        self.service = Gateway(
            self.model,
            self.engine,
            self.admission,
            self.forecast,
            self.metrics,
            config.batch_dir,
        )

    async def background(self, serving: Serving) -> None:
        """Drive the engine; ready while it has a session with the worker."""
        self.service.jobs.resume()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.engine.run(Readiness(self.engine, serving.set_ready)))
            tasks.create_task(
                self.forecast.run(
                    lambda: self.engine.info, self.engine.requests_on_hand, self._publish
                )
            )

    def servicers(self) -> list[object]:
        """The public API, and what of other protocols is installed."""
        servicers: list[object] = [self.service, InferenceService(self.service, self.model)]
        if importlib.util.find_spec("smg_grpc_proto") is not None:
            from gateway.vllm_engine import VllmEngine

            servicers.append(VllmEngine(self.service, self.model))
        return servicers

    def _adopt(self, info: WorkerInfo) -> None:
        self.model.adopt(info)
        self.admission.info = info

    def _publish(self, plan: Plan) -> None:
        log.info("planned", plan=plan)
        self.admission.plan = plan
        self.engine.expected_lengths = self.forecast.mean_lengths
        if plan.tokens_per_s:
            step_tokens = self.engine.scheduler.limits.max_step_tokens
            self.engine.patience.predicted_step_s = step_tokens / plan.tokens_per_s

    async def drain(self, grace_s: float) -> None:
        """Let running requests end; `serve` bounds the time."""
        await self.service.jobs.close()
        await self.engine.until_idle()


async def serve_gateway(config: GatewayConfig) -> int:
    """Serve until a signal comes; returns the exit status."""
    tls = config.peer_tls
    async with peer(config.gpu_worker, tls) as worker, peer(config.planner, tls) as planner:
        server = GatewayServer(config, worker, planner)
        try:
            with (
                metrics_server(server.metrics, config.metrics_listen),
                tracing(config.otel) as server.service.tracing,
            ):
                return await serve(
                    server.servicers(),
                    config.serving,
                    background=server.background,
                    drain=server.drain,
                )
        finally:
            server.engine.fail_all(Unavailable("this server has stopped", reason="STOPPING"))
            server.engine.check_integrity()
