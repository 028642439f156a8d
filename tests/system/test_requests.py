"""Requests that are wrong, against a real system at work: each is refused, nobody else notices."""

import asyncio
from pathlib import Path

import grpc
import pytest
from moelens.client import AsyncClient, RequestFailed, request

from tests.system.conftest import Setting, draw_prompts, greedy, running

CODE = grpc.StatusCode
BAD = [
    ("", {}, CODE.INVALID_ARGUMENT, "text"),
    ([], {}, CODE.INVALID_ARGUMENT, "token_ids"),
    ([5, 4096], {}, CODE.INVALID_ARGUMENT, "token_ids.ids"),
    ([5], {"max_tokens": 0}, CODE.INVALID_ARGUMENT, "max_tokens"),
    ([5], {"max_tokens": 100_000}, CODE.INVALID_ARGUMENT, "max_tokens"),
    ([5], {"temperature": float("nan")}, CODE.INVALID_ARGUMENT, "sampling.temperature"),
    ([5], {"model": "another"}, CODE.NOT_FOUND, "model"),
    ("word " * 200_000, {}, CODE.INVALID_ARGUMENT, "text"),
    ("a" * 9_000_000, {}, CODE.RESOURCE_EXHAUSTED, "text"),
    ([5], {"logit_bias": {4096: 1.0}}, CODE.INVALID_ARGUMENT, "sampling.logit_bias"),
]


def test_bad_requests_harm_nobody(demo_model: Path) -> None:
    good = draw_prompts(8, 200, 4096)

    async def refused(client: AsyncClient, prompt: object, options: dict) -> RequestFailed:  # type: ignore[type-arg]
        with pytest.raises(RequestFailed) as caught:
            await client.generate(prompt, **options)  # type: ignore[arg-type]
        return caught.value

    async def main() -> None:
        async with running(demo_model, Setting("bf16")) as (_, client):
            alone = await greedy(client, good, 64)
            running_now = asyncio.ensure_future(greedy(client, good, 64))
            for prompt, options, code, field in BAD:
                error = await refused(client, prompt, options)
                assert (error.code, error.field) == (code, field)
            assert await running_now == alone

    asyncio.run(main())


def test_message_beyond_the_limit_is_refused_and_the_connection_lives(demo_model: Path) -> None:
    async def main() -> None:
        async with running(demo_model, Setting("bf16")) as (_, client):
            with pytest.raises(RequestFailed) as caught:
                await client.generate("a" * 20_000_000)
            assert caught.value.code == CODE.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_s is None
            assert len(await greedy(client, [[5, 6]], 3)) == 1

    asyncio.run(main())


def test_seeded_output_does_not_depend_on_who_shares_the_batch(demo_model: Path) -> None:
    prompts = draw_prompts(24, 120, 4096, seed=4)
    options = {"max_tokens": 40, "temperature": 0.9, "top_p": 0.95, "top_k": 50}

    async def main() -> None:
        async with running(demo_model, Setting("bf16", kv_blocks=40)) as (_, client):

            async def one(i: int) -> list[int]:
                (answer,) = await client.generate(prompts[i], seed=100 + i, **options)  # type: ignore[arg-type]
                return answer.token_ids

            alone = [await one(i) for i in range(4)]
            together = await asyncio.gather(*(one(i) for i in range(len(prompts))))
            assert together[:4] == alone
            assert (await client.load()).preemptions > 0

    asyncio.run(main())


def test_logprobs_are_those_of_transformers(demo_model: Path) -> None:
    import torch

    from tests.system.models import reference

    prompt = draw_prompts(2, 60, 4096, seed=9)[1]

    async def main() -> None:
        async with running(demo_model, Setting("fp32")) as (_, client):
            (answer,) = await client.generate(
                prompt, max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2, echo=True
            )
            ids = torch.tensor([[*prompt, *answer.token_ids]])
            with torch.inference_mode():
                expected = reference(demo_model, "fp32")(ids).logits[0].log_softmax(-1)
            for i, entry in enumerate(answer.logprobs):
                row = expected[len(prompt) - 1 + i]
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
                assert list(entry.top_token_ids) == row.topk(3).indices.tolist()
            assert answer.prompt is not None
            assert list(answer.prompt.token_ids) == prompt
            assert len(answer.prompt.logprobs) == len(prompt) - 1
            for i, entry in enumerate(answer.prompt.logprobs):
                assert entry.token_id == prompt[i + 1]
                assert entry.logprob == pytest.approx(float(expected[i, entry.token_id]), abs=1e-3)

    asyncio.run(main())


def test_options_of_the_client_are_those_of_the_protocol() -> None:
    message = request("x", max_tokens=3, logit_bias={5: 1.5}, stop=["a"], batch=True, seed=4)
    assert (message.text, message.max_tokens, message.sampling.seed) == ("x", 3, 4)
    assert dict(message.sampling.logit_bias) == {5: 1.5}
    with pytest.raises(TypeError, match="temprature"):
        request("x", temprature=1.0)  # type: ignore[call-arg]


def test_a_burst_of_streams_is_queued_not_cancelled(demo_model: Path) -> None:
    """More calls than gRPC lets wait by itself, all in the same moment."""
    prompts = draw_prompts(2000, 8, 4096, seed=5)
    flags = {"gateway": ("--max-waiting-requests=4000",)}

    async def main() -> None:
        async with running(demo_model, Setting("bf16", more=flags)) as (_, client):
            outputs = await greedy(client, prompts, 2)
            assert [len(output) for output in outputs] == [2] * len(prompts)

    asyncio.run(main())
