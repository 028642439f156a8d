"""Steps that fail as a whole: one request is to blame, and it alone ends."""

import asyncio

import grpc
import pytest

from gateway.pacing import EngineConfig
from protos.errors import Failure, decode_failure
from tests.gateway.conftest import House, MakeHouse
from tests.gateway.fakes import FakeWorker, continuation
from tests.gateway.test_engine import prompts, run_all

BAD = 4001


async def failure_of(house: House, prompt: list[int]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.tokens(prompt, 30)
    return decode_failure(caught.value)


def good_prompts(count: int) -> list[list[int]]:
    return [[i for i in prompt if i != BAD] or [5] for prompt in prompts(count, 60)]


@pytest.mark.parametrize("count", [1, 7, 31])
@pytest.mark.parametrize("fault", ["failing_token", "deadly_token"])
def test_request_that_makes_steps_fail_ends_alone(house: MakeHouse, fault: str, count: int) -> None:
    async def main() -> None:
        worker = FakeWorker()
        setattr(worker.faults, fault, BAD)
        config = EngineConfig(retry_period_s=0.001)
        async with house(worker, engine=config) as h:
            bad = asyncio.create_task(failure_of(h, [9, BAD, 9]))
            await run_all(h, good_prompts(count), max_tokens=25)
            failure = await bad
            assert failure.reason == "REQUEST_FAILED"
            assert "steps fail with this request" in failure.message
            assert not h.gateway.engine.broken
            h.check_all_free()

    asyncio.run(main())


def test_requests_that_come_during_the_search_are_served_after_it(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker(step_s=0.002)
        worker.faults.failing_token = BAD
        async with house(worker, engine=EngineConfig(retry_period_s=0.02)) as h:
            bad = [asyncio.create_task(failure_of(h, [9, BAD, i])) for i in range(3)]
            first = asyncio.create_task(run_all(h, good_prompts(8), max_tokens=25))
            await asyncio.sleep(0.05)
            await run_all(h, prompts(8, 60, seed=5), max_tokens=25)
            await first
            assert {(await each).reason for each in bad} == {"REQUEST_FAILED"}
            h.check_all_free()

    asyncio.run(main())


def test_steps_shrink_until_they_fit_the_device(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker(max_step_tokens=256)
        worker.faults.memory_tokens = 40
        async with house(worker, engine=EngineConfig(retry_period_s=0.001)) as h:
            await run_all(h, prompts(16, 100), max_tokens=25)
            assert h.gateway.engine.scheduler.limits.max_step_tokens == 32
            h.check_all_free()

    asyncio.run(main())


def test_a_worker_without_any_memory_left_fails_requests_and_does_not_spin(
    house: MakeHouse,
) -> None:
    async def main() -> None:
        worker = FakeWorker()
        worker.faults.memory_tokens = 0
        async with house(worker, engine=EngineConfig(retry_period_s=0.001)) as h:
            assert (await failure_of(h, [5, 6, 7])).code in (
                grpc.StatusCode.INTERNAL,
                grpc.StatusCode.UNAVAILABLE,
            )
            sessions = worker.sessions
            await asyncio.sleep(0.2)
            assert worker.sessions <= sessions + 1
            worker.faults.memory_tokens = None
            assert await h.tokens([5, 6, 7], 10) == continuation([5, 6, 7], 10)
            h.check_all_free()

    asyncio.run(main())


def test_waiting_requests_end_with_the_reason_when_no_worker_comes_back(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker(step_s=0.01)
        config = EngineConfig(retry_period_s=0.001, worker_timeout_s=0.5)
        async with house(worker, engine=config) as h:
            waiting = asyncio.create_task(failure_of(h, [5] * 20))
            await asyncio.sleep(0.05)
            worker.faults.loading_calls = 10**9
            worker.faults.die_after_steps = 0
            failure = await waiting
            assert failure.code is grpc.StatusCode.UNAVAILABLE
            assert failure.reason == "OUT_OF_ORDER"
            assert h.ready[-1] is False
            assert (await failure_of(h, [5])).reason == "OUT_OF_ORDER"

    asyncio.run(main())
