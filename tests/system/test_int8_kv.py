"""A KV cache in 8 bits through the whole system: half the bytes, nearly the same model."""

import asyncio
from pathlib import Path
from statistics import fmean

from moelens.client import AsyncClient

from planner.spec import ModelSpec
from tests.system.conftest import Setting, draw_prompts, running


async def logprobs(client: AsyncClient, prompts: list[list[int]]) -> list[list[float]]:
    """Of every prompt token but the first."""
    answers = await asyncio.gather(
        *(client.generate(p, max_tokens=1, echo=True, prompt_logprobs=1) for p in prompts)
    )
    reports = [completion.prompt for (completion,) in answers]
    return [[entry.logprob for entry in report.logprobs] for report in reports if report]


def test_int8_kv_says_so_and_keeps_the_likelihoods(demo_model: Path) -> None:
    prompts = draw_prompts(8, 400, 4096, seed=8)

    async def main(kv_dtype: str) -> tuple[list[list[float]], str, int]:
        setting = Setting("bf16", more={"gpu-worker": (f"--kv-dtype={kv_dtype}",)})
        async with running(demo_model, setting) as (_, client):
            model = await client.model()
            return await logprobs(client, prompts), model.kv_dtype, model.kv_bytes_per_token

    exact, exact_dtype, exact_bytes = asyncio.run(main("auto"))
    rounded, dtype, n_bytes = asyncio.run(main("int8"))
    assert (exact_dtype, dtype) == ("bf16", "int8")
    spec = ModelSpec.from_directory(demo_model)
    assert exact_bytes == spec.kv_bytes_per_token
    assert n_bytes == spec.with_formats(kv="int8").kv_bytes_per_token < 0.6 * exact_bytes
    changes = [
        abs(a - b)
        for one, other in zip(exact, rounded, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert len(changes) == sum(len(prompt) - 1 for prompt in prompts)
    assert 0 < fmean(changes) < 0.05
