"""Greedy output of the whole system equals transformers', whatever the work is split into."""

import asyncio
from pathlib import Path

import pytest

from tests.system.conftest import Setting, draw_prompts, greedy, leave_early, running
from tests.system.models import judge

PROMPTS, LONGEST, GENERATED = 64, 300, 32
# Room for the longest sequence and little more, so that decodes push each other out.
TIGHT = {"kv_blocks": 40, "chunk_tokens": 16, "step_tokens": 96}

DEMO = [
    Setting("bf16", processes=1, isa="scalar"),
    Setting("bf16", processes=2, isa="avx2", **TIGHT),
    Setting("bf16", processes=3, isa="avx512"),
    Setting("bf16", processes=2, isa="avx512_bf16"),
    Setting("fp32", processes=1, isa="avx512"),
    Setting("fp32", processes=3, **TIGHT),
]
TINY_SETTINGS = [
    ("multi-query", Setting("fp32", processes=1, isa="avx2")),
    ("multi-query", Setting("bf16", processes=3, checksums=True, **TIGHT)),
    ("multi-head", Setting("bf16", processes=2, isa="scalar", checksums=True)),
    ("multi-head", Setting("fp32", processes=1, **TIGHT)),
    ("many-experts", Setting("bf16", processes=3, isa="avx512_bf16")),
    ("many-experts", Setting("fp32", processes=2, isa="scalar", **TIGHT)),
]


def name_of(value: object) -> str | None:
    if not isinstance(value, Setting):
        return None
    tight = "-tight" if value.chunk_tokens else ""
    return f"{value.dtype}-{value.processes}-{value.isa or 'best'}{tight}"


def check(model: Path, setting: Setting, vocabulary: int) -> None:
    """64 prompts at once, among clients that leave, against the reference."""
    prompts = draw_prompts(PROMPTS, LONGEST, vocabulary)
    leavers = draw_prompts(8, 100, vocabulary, seed=1)
    # In a tight pool everybody has to grow past what was free when they started.
    generated = 64 if setting.chunk_tokens else GENERATED

    async def main() -> tuple[list[list[int]], int]:
        async with running(model, setting) as (_, client):
            leaving = [leave_early(client, prompt, 1 + i) for i, prompt in enumerate(leavers)]
            outputs, *_ = await asyncio.gather(greedy(client, prompts, generated), *leaving)
            return outputs, (await client.load()).preemptions

    outputs, preemptions = asyncio.run(main())
    assert [len(output) for output in outputs] == [generated] * PROMPTS
    verdict = judge(model, setting.dtype, prompts, outputs)
    assert not verdict.wrong, verdict.wrong[:5]
    # In FP32 never; in BF16 the router's own logits tie so often that an expert may differ.
    assert verdict.rerouted <= (0.005 * verdict.decided if setting.dtype == "bf16" else 0)
    assert verdict.decided > 0.2 * PROMPTS * generated, "the reference hardly decides anything"
    if setting.chunk_tokens is not None:
        assert preemptions >= 20


@pytest.mark.slow
@pytest.mark.parametrize("setting", DEMO, ids=name_of)
def test_demo_model_says_what_transformers_says(
    demo_model: Path, supported_isas: tuple[str, ...], setting: Setting
) -> None:
    if setting.isa not in (None, *supported_isas):
        pytest.skip(f"this machine has no {setting.isa}")
    check(demo_model, setting, vocabulary=4096)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), TINY_SETTINGS, ids=name_of)
def test_random_checkpoints_say_what_transformers_says(
    tiny_models: dict[tuple[str, str], Path],
    supported_isas: tuple[str, ...],
    name: str,
    setting: Setting,
) -> None:
    if setting.isa not in (None, *supported_isas):
        pytest.skip(f"this machine has no {setting.isa}")
    check(tiny_models[name, setting.dtype], setting, vocabulary=320)


def test_text_equals_what_transformers_generates(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    from tests.system.models import reference

    prompts = ["First Citizen:\n", "ROMEO:\nBut soft"]
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = reference(demo_model, "fp32")

    async def main() -> list[str]:
        async with running(demo_model, Setting("fp32")) as (_, client):
            answers = [client.generate(p, max_tokens=24, temperature=0.0) for p in prompts]
            return [completions[0].text for completions in await asyncio.gather(*answers)]

    for prompt, text in zip(prompts, asyncio.run(main()), strict=True):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
        new = output[inputs["input_ids"].shape[1] :]
        assert text == tokenizer.decode(new, skip_special_tokens=True)
