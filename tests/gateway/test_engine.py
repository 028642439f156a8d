"""The engine against a worker that checks every plan and remembers every token."""

import asyncio
import random

import grpc
import pytest
from moelens.v1 import gateway_pb2 as messages

from gateway.pacing import EngineConfig
from protos.errors import decode_failure
from tests.gateway.conftest import House, MakeHouse
from tests.gateway.fakes import FakeWorker, continuation


def prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(3, 4096) for _ in range(draw.randint(1, longest))] for _ in range(count)
    ]


async def run_all(house: House, work: list[list[int]], max_tokens: int) -> None:
    """Submit everything at once and compare with an undisturbed run."""
    answers = await asyncio.gather(*(house.tokens(prompt, max_tokens) for prompt in work))
    for prompt, answer in zip(work, answers, strict=True):
        assert answer == continuation(prompt, max_tokens)


def test_many_requests_at_once_get_their_own_tokens(house: MakeHouse) -> None:
    async def main() -> None:
        async with house() as h:
            await run_all(h, prompts(40, 300), max_tokens=20)
            h.check_all_free()

    asyncio.run(main())


def test_preempted_requests_go_on_where_they_were(house: MakeHouse) -> None:
    async def main() -> None:
        async with house(FakeWorker(kv_blocks=40, max_step_tokens=128)) as h:
            await run_all(h, prompts(48, 100), max_tokens=60)
            assert h.gateway.engine.scheduler.num_preemptions >= 20
            h.check_all_free()

    asyncio.run(main())


@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
def test_prefill_in_small_chunks_and_any_plan_ahead_change_nothing(
    house: MakeHouse, plan_ahead: int
) -> None:
    async def main() -> None:
        config = EngineConfig(plan_ahead_steps=plan_ahead, prefill_chunk_tokens=16)
        async with house(FakeWorker(kv_blocks=64), engine=config) as h:
            await run_all(h, prompts(24, 120), max_tokens=40)
            h.check_all_free()

    asyncio.run(main())


def test_worker_that_dies_again_and_again_loses_no_token(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker(kv_blocks=64)
        async with house(worker) as h:
            running = asyncio.ensure_future(run_all(h, prompts(24, 120), max_tokens=40))
            for _ in range(6):
                worker.faults.die_after_steps = 7
                while worker.faults.die_after_steps is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await running
            assert h.gateway.engine.recoveries == 6
            assert worker.sessions == 7
            h.check_all_free()

    asyncio.run(main())


def test_worker_that_comes_back_with_another_cache_size_goes_on(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker(kv_blocks=256, step_s=0.002)
        async with house(worker) as h:
            running = asyncio.ensure_future(run_all(h, prompts(24, 120), max_tokens=40))
            await asyncio.sleep(0.05)
            worker.info.kv_blocks = 50
            worker.faults.die_after_steps = 0
            await running
            assert h.gateway.engine.scheduler.pool.total_blocks == 50
            h.check_all_free()

    asyncio.run(main())


def test_hung_worker_counts_as_dead_after_the_step_timeout(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker()
        config = EngineConfig(step_timeout_s=0.5, retry_period_s=0.01)
        async with house(worker, engine=config) as h:
            worker.faults.hang_after_steps = 5
            await run_all(h, prompts(8, 50), max_tokens=20)
            assert h.gateway.engine.recoveries == 1
            h.check_all_free()

    asyncio.run(main())


def test_worker_that_always_fails_ends_requests_with_unavailable(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker()
        config = EngineConfig(max_failures=3, retry_period_s=0.001)
        async with house(worker, engine=config) as h:

            async def keep_failing() -> None:
                while True:
                    worker.faults.die_after_steps = 0
                    await asyncio.sleep(0.001)

            failing = asyncio.create_task(keep_failing())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await h.tokens([5, 6, 7], 10)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert False in h.ready
            failing.cancel()
            worker.faults.die_after_steps = None
            await asyncio.sleep(0.3)
            assert await h.tokens([5, 6, 7], 10) == continuation([5, 6, 7], 10)
            assert h.ready[-1]
            h.check_all_free()

    asyncio.run(main())


def test_poisoned_request_fails_alone(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker()
        worker.faults.poison_token = 4001
        async with house(worker) as h:
            good = [[i for i in p if i != 4001] or [5] for p in prompts(16, 60)]
            bad = asyncio.create_task(h.tokens([9, 4001, 9], 30))
            await run_all(h, good, max_tokens=25)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bad
            failure = decode_failure(caught.value)
            assert failure.code == grpc.StatusCode.DATA_LOSS
            assert "not finite" in failure.message
            h.check_all_free()

    asyncio.run(main())


def test_clients_that_leave_free_their_cache_and_disturb_nobody(house: MakeHouse) -> None:
    async def main() -> None:
        async with house(FakeWorker(step_s=0.001)) as h:

            async def leave(prompt: list[int], after: int) -> None:
                request = messages.GenerateRequest(token_ids=messages.TokenIds(ids=prompt))
                call = h.stub.Generate(request)
                seen = 0
                async for event in call:
                    seen += len(event.tokens.token_ids)
                    if seen >= after:
                        break
                call.cancel()

            leavers = prompts(12, 80, seed=3)
            leaving = [leave(prompt, 1 + i % 7) for i, prompt in enumerate(leavers)]
            await asyncio.gather(run_all(h, prompts(12, 80), max_tokens=50), *leaving)
            await asyncio.sleep(0.1)
            h.check_all_free()

    asyncio.run(main())


def test_cancelled_request_frees_its_blocks_within_a_step(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker()
        async with house(worker) as h:
            request = messages.GenerateRequest(token_ids=messages.TokenIds(ids=[5] * 100))
            call = h.stub.Generate(request)
            await call.read()
            await call.read()
            worker.may_step.clear()  # the step under way does not end
            call.cancel()
            await asyncio.sleep(0.1)
            assert h.gateway.engine.scheduler.pool.used_blocks == 0
            worker.may_step.set()
            assert await h.tokens([7] * 50, 5) == continuation([7] * 50, 5)
            h.check_all_free()

    asyncio.run(main())


def test_waits_for_a_worker_that_is_still_loading(house: MakeHouse) -> None:
    async def main() -> None:
        worker = FakeWorker()
        worker.faults.loading_calls = 3
        async with house(worker) as h:
            assert await h.tokens([5, 6], 3) == continuation([5, 6], 3)

    asyncio.run(main())
