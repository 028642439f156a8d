"""Predictions follow the requests, and come from the real planner."""

import asyncio
import json
from pathlib import Path

import grpc
from moelens.v1.gpu_worker_pb2 import GetInfoResponse
from moelens.v1.planner_pb2_grpc import PlannerStub, add_PlannerServicer_to_server

from gateway.admission import Plan
from gateway.forecast import Forecast, Workload, ask
from gateway.worker import WorkerInfo
from planner.catalogue import hardware
from planner.service import PlannerService
from planner.spec import ModelSpec
from protos.transport import channel


def info(model: Path, resident_share: float = 0.0) -> WorkerInfo:
    return WorkerInfo.from_message(
        GetInfoResponse(
            model_config_json=(model / "config.json").read_text(),
            dtype="bf16",
            kv_dtype="bf16",
            vocab_size=4096,
            max_context_tokens=2048,
            block_tokens=16,
            kv_blocks=4096,
            device="cuda",
            resident_share=resident_share,
            hardware_spec_json=json.dumps(hardware("a40-xeon8380").to_json()),
        )
    )


def test_real_planner_predicts_for_the_worker(tmp_path: Path, demo_model: Path) -> None:
    async def main() -> None:
        address = f"unix:{tmp_path}/p.sock"
        server = grpc.aio.server()
        add_PlannerServicer_to_server(PlannerService(), server)
        server.add_insecure_port(address)
        await server.start()
        spec = ModelSpec.from_directory(demo_model)
        async with channel(address) as peer:
            stub = PlannerStub(peer)
            short = await ask(stub, info(demo_model), spec, Workload(64, 64, 200))
            long = await ask(stub, info(demo_model), spec, Workload(64, 512, 200))
            resident = await ask(stub, info(demo_model, 0.9), spec, Workload(64, 64, 200))
        await server.stop(0)
        assert short is not None
        assert resident is not None
        assert long is not None
        assert short.tokens_per_s is not None
        assert long.tokens_per_s is not None
        assert short.tokens_per_s > long.tokens_per_s > 0
        assert resident.tokens_per_s is not None
        assert resident.tokens_per_s > short.tokens_per_s  # less to stream
        assert short.generated_tokens_per_s == short.tokens_per_s / 2
        assert short.limit

    asyncio.run(main())


def test_without_a_planner_there_is_no_prediction(tmp_path: Path, demo_model: Path) -> None:
    async def main() -> None:
        spec = ModelSpec.from_directory(demo_model)
        async with channel(f"unix:{tmp_path}/nobody.sock") as peer:
            assert await ask(PlannerStub(peer), info(demo_model), spec, Workload(1, 1, 1)) is None

    asyncio.run(main())


def test_workload_follows_the_lengths_of_recent_requests(demo_model: Path) -> None:
    forecast = Forecast(None, ModelSpec.from_directory(demo_model))  # type: ignore[arg-type]
    assert forecast.workload(3).requests == 3
    forecast.observe(10, 20)
    assert forecast.workload(1) == Workload(10, 20, 1)
    for _ in range(300):
        forecast.observe(1000, 200)
    followed = forecast.workload(1)
    assert abs(followed.prompt_tokens - 1000) <= 10
    assert abs(followed.generated_tokens - 200) <= 2
    assert Plan().tokens_per_s is None  # unknown is not zero
