"""A search that everybody on trial has left must end, or nobody held back would ever run."""

import asyncio

from moelens.v1.common_pb2 import SamplingParams
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub

from gateway.engine import Engine
from gateway.generation import Work
from gateway.metrics import Metrics
from gateway.pacing import EngineConfig
from planner.blocks import BlockPool
from planner.scheduler import Scheduler, SchedulerLimits


def test_cancelling_the_last_suspect_lets_the_others_in_again() -> None:
    async def run() -> None:
        engine = Engine(GpuWorkerStub(_NoChannel()), EngineConfig(), Metrics())  # type: ignore[no-untyped-call]
        engine._scheduler = Scheduler(BlockPool(64, 16), SchedulerLimits(64))
        inbox = asyncio.Event()
        suspect = engine.submit(Work("a", (1, 2), 4, SamplingParams()), inbox)
        step = engine.scheduler.schedule()
        assert step is not None
        engine._trials.begin(step.chunks, doubtful=False)
        other = engine.submit(Work("b", (1, 2), 4, SamplingParams()), inbox)
        engine.cancel(suspect)
        assert not engine._trials.under_way
        assert engine.scheduler.waiting == 1
        engine.cancel(other)
        assert engine.scheduler.waiting == 0

    asyncio.run(run())


class _NoChannel:
    """Makes stubs, carries nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *arguments, **keywords: None
