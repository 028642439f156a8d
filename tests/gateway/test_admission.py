"""The planner decides who may queue; without it the last plan stays in force."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from moelens.v1 import planner_pb2 as messages
from moelens.v1.common_pb2 import SamplingParams
from moelens.v1.gpu_worker_pb2 import GetInfoResponse
from moelens.v1.planner_pb2_grpc import PlannerServicer, PlannerStub, add_PlannerServicer_to_server

from gateway.admission import ADMIT_TIMEOUT_S, Admission, Load, Plan
from gateway.validation import CheckedRequest
from gateway.worker import WorkerInfo
from protos.errors import ResourceExhausted
from protos.transport import channel

# A worker of 1,600 tokens.
INFO = WorkerInfo.from_message(
    GetInfoResponse(vocab_size=10, max_context_tokens=512, block_tokens=16, kv_blocks=100)
)


def request(outputs: int = 1) -> CheckedRequest:
    return CheckedRequest(
        request_id="r",
        prompt_ids=(1, 2, 3),
        max_tokens=20,
        outputs=outputs,
        seed=0,
        sampling=SamplingParams(),
        stop=(),
        include_stop=False,
        echo=False,
        keep_special_tokens=False,
        batch=False,
        silent_stop_ids=frozenset(),
    )


def load(waiting: int = 0, tokens_per_s: float = 0.0) -> Load:
    return Load(4, waiting, waiting_tokens=600, unfinished_tokens=400, tokens_per_s=tokens_per_s)


class FakePlanner(PlannerServicer):
    """Answers what the test says, as late as it says."""

    def __init__(self) -> None:
        self.answer = messages.AdmitResponse(admitted=True)
        self.delay_s = 0.0
        self.asked: list[messages.AdmitRequest] = []

    async def Admit(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        return self.answer


@asynccontextmanager
async def admission(
    directory: Path, planner: FakePlanner | None, most_waiting: int = 10
) -> AsyncIterator[Admission]:
    address = f"unix:{directory}/p.sock"
    server = grpc.aio.server()
    if planner is not None:
        add_PlannerServicer_to_server(planner, server)
        server.add_insecure_port(address)
    await server.start()
    async with channel(address) as peer:
        guard = Admission(PlannerStub(peer), most_waiting)
        guard.info = INFO
        try:
            yield guard
        finally:
            await server.stop(0)


def test_planner_is_told_everything_that_its_answer_depends_on(tmp_path: Path) -> None:
    async def main() -> None:
        planner = FakePlanner()
        async with admission(tmp_path, planner) as guard:
            await guard.admit(request(outputs=3), load(waiting=2, tokens_per_s=50.0))
        (asked,) = planner.asked
        assert (asked.prompt_tokens, asked.max_tokens) == (3, 20)
        assert (asked.waiting_requests, asked.running_requests) == (4, 4)
        assert (asked.waiting_tokens, asked.unfinished_tokens) == (600, 400)
        assert (asked.kv_capacity_tokens, asked.block_tokens) == (1600, 16)
        assert (asked.max_waiting_requests, asked.tokens_per_s) == (10, 50.0)

    asyncio.run(main())


@pytest.mark.parametrize("retry_after_s", [2.5, None])
def test_refusal_carries_the_planners_reason_and_delay(
    tmp_path: Path, retry_after_s: float | None
) -> None:
    async def main() -> None:
        planner = FakePlanner()
        planner.answer = messages.AdmitResponse(
            admitted=False, reason="10 requests wait", retry_after_s=retry_after_s
        )
        async with admission(tmp_path, planner) as guard:
            with pytest.raises(ResourceExhausted, match="10 requests wait") as caught:
                await guard.admit(request(), load())
            assert caught.value.retry_after_s == retry_after_s

    asyncio.run(main())


def test_missing_planner_admits_and_is_left_alone_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        async with admission(tmp_path, None) as guard:
            await guard.admit(request(), load())
            begin = time.monotonic()
            for _ in range(100):
                await guard.admit(request(), load())
            assert time.monotonic() - begin < ADMIT_TIMEOUT_S / 2

    asyncio.run(main())


def test_hung_planner_delays_one_request_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        planner = FakePlanner()
        planner.delay_s = 60.0
        async with admission(tmp_path, planner) as guard:
            begin = time.monotonic()
            await guard.admit(request(), load())
            assert time.monotonic() - begin >= ADMIT_TIMEOUT_S * 0.9
            for _ in range(20):
                await guard.admit(request(), load())
            assert len(planner.asked) == 1

    asyncio.run(main())


def test_queue_bound_holds_without_the_planner(tmp_path: Path) -> None:
    async def main() -> None:
        async with admission(tmp_path, None) as guard:
            guard.check_room(request(), load(waiting=9))
            with pytest.raises(ResourceExhausted) as caught:
                guard.check_room(request(outputs=2), load(waiting=9))
            assert caught.value.retry_after_s == 1.0
            guard.plan = Plan(tokens_per_s=100.0)  # the last one that the planner made
            with pytest.raises(ResourceExhausted) as caught:
                guard.check_room(request(), load(waiting=10))
            assert caught.value.retry_after_s == 10.0  # 1,000 outstanding tokens
            with pytest.raises(ResourceExhausted) as caught:
                guard.check_room(request(), load(waiting=10, tokens_per_s=500.0))
            assert caught.value.retry_after_s == 2.0  # what is measured goes first

    asyncio.run(main())
