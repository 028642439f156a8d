"""The engine against transformers with the same weights, and against itself cut differently."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moelens.v1 import gpu_worker_pb2

from gpu_worker.cpu_ops import CpuOps
from gpu_worker.ops import TorchOps


def prompts(n: int, vocab: int, longest: int, seed: int = 0) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(0, vocab, size=rng.integers(1, longest + 1)).tolist() for i in range(n)}


def reference_logits(directory: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def logits_of_all_positions(
    rig: Any,
    make_driver: Any,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int = 100,
) -> Any:
    """The FP32 logits behind prompt log-probabilities, position by position."""
    from gpu_worker import head

    rows: list[Any] = []

    def keep(logits: Any, token_id: int, n_top: int) -> Any:
        rows.append(logits.copy())

    monkeypatch.setattr(head, "token_logprob", keep)
    driver = make_driver(rig, chunk_tokens=chunk_tokens)
    driver.generate({0: tokens}, 1, prompt_logprobs=0)
    return torch.from_numpy(np.stack(rows))


def torch_ops(dtype: torch.dtype) -> Any:
    return TorchOps(dtype, torch.device("cpu"))


@pytest.mark.parametrize("make_ops", [CpuOps, torch_ops])
@pytest.mark.parametrize(
    ("checkpoint", "dtype", "tolerance"),
    [
        ("checkpoint_fp32", torch.float32, 1e-4),
        ("checkpoint_bf16", torch.bfloat16, 2e-2),
        ("checkpoint_bf16", torch.float32, 1e-4),
        ("checkpoint_fp32", torch.bfloat16, 2e-2),
    ],
)
def test_logits_agree_with_transformers(
    checkpoint: str,
    dtype: torch.dtype,
    tolerance: float,
    make_ops: Any,
    make_rig: Any,
    make_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    directory = request.getfixturevalue(checkpoint)
    tokens = prompts(1, 199, 300, seed=3)[0]
    expected = reference_logits(directory, tokens, dtype)[:-1]
    rig = make_rig(directory, dtype=dtype, make_ops=make_ops)
    found = logits_of_all_positions(rig, make_driver, tokens, monkeypatch)
    assert found.shape == expected.shape
    assert torch.linalg.norm(found - expected) / torch.linalg.norm(expected) < tolerance


def test_an_int8_cache_changes_logits_a_little(
    checkpoint_bf16: Path, make_rig: Any, make_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompts(1, 199, 300, seed=3)[0]
    exact, rounded = (
        logits_of_all_positions(
            make_rig(checkpoint_bf16, kv_dtype=kv_dtype), make_driver, tokens, monkeypatch
        )
        for kv_dtype in ("auto", "int8")
    )
    change = torch.linalg.norm(rounded - exact) / torch.linalg.norm(exact)
    assert 0 < change < 3e-2


def assert_greedy_by_reference(
    directory: Path, tokens: list[int], n_prompt: int, dtype: torch.dtype, least_margin: float
) -> int:
    """Every generated token is transformers' choice after the tokens before it, wherever that
    choice is clear; returns how many were compared."""
    best = reference_logits(directory, tokens[:-1], dtype)[n_prompt - 1 :].topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > least_margin
    found = torch.tensor(tokens[n_prompt:])
    assert torch.equal(found[clear], best.indices[clear, 0])
    return int(clear.sum())


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "least_margin"),
    [("checkpoint_fp32", torch.float32, 1e-4), ("checkpoint_bf16", torch.bfloat16, 0.05)],
)
def test_greedy_tokens_agree_with_transformers(
    checkpoint: str,
    dtype: torch.dtype,
    least_margin: float,
    make_rig: Any,
    make_driver: Any,
    request: pytest.FixtureRequest,
) -> None:
    directory = request.getfixturevalue(checkpoint)
    driver = make_driver(make_rig(directory), chunk_tokens=16)
    asked = prompts(8, 199, 90)
    driver.generate(asked, 12)
    compared = 0
    for sequence_id, prompt in asked.items():
        tokens = driver.tokens[sequence_id]
        assert len(tokens) == len(prompt) + 12
        compared += assert_greedy_by_reference(directory, tokens, len(prompt), dtype, least_margin)
    assert compared >= 48


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}])
def test_tokens_do_not_depend_on_chunking_or_company(
    sampling: dict[str, float], checkpoint_fp32: Path, make_rig: Any, make_driver: Any
) -> None:
    asked = prompts(6, 199, 120)
    together = make_driver(make_rig(checkpoint_fp32))
    together.generate(asked, 8, **sampling)
    for chunk_tokens in (1, 7, 16):
        alone = make_driver(make_rig(checkpoint_fp32), chunk_tokens=chunk_tokens)
        alone.generate({2: asked[2]}, 8, **sampling)
        assert alone.tokens[2] == together.tokens[2]


def test_tokens_do_not_depend_on_preemption(
    checkpoint_fp32: Path, make_rig: Any, make_driver: Any
) -> None:
    asked = prompts(3, 199, 60)
    sampling = {"temperature": 0.8}
    undisturbed = make_driver(make_rig(checkpoint_fp32))
    undisturbed.generate(asked, 10, **sampling)

    driver = make_driver(make_rig(checkpoint_fp32))
    driver.generate(asked, 4, **sampling)
    plan = gpu_worker_pb2.StepPlan()
    driver.release(plan, 1)
    driver.chunk(plan, 0)
    driver.run(plan)
    plan = gpu_worker_pb2.StepPlan()
    driver.start(plan, 1, driver.tokens[1], len(asked[1]), **sampling)
    for step in range(6):
        for sequence_id in asked:
            if len(driver.tokens[sequence_id]) < len(asked[sequence_id]) + 10:
                driver.chunk(plan, sequence_id)
        driver.run(plan)
        plan = gpu_worker_pb2.StepPlan()
        assert step < 6
    assert driver.tokens == undisturbed.tokens


def test_a_sequence_with_bad_logits_fails_alone(
    checkpoint_fp32: Path, make_rig: Any, make_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(3, 199, 40)
    good = make_driver(make_rig(checkpoint_fp32))
    good.generate(asked, 3)

    rig = make_rig(checkpoint_fp32)
    driver = make_driver(rig)
    decoder = rig.engine._decoder
    real = decoder.logits

    def poisoned(base: Any, x: torch.Tensor) -> torch.Tensor:
        logits = real(base, x)
        logits[1, 5] = float("nan")
        return logits

    plan = gpu_worker_pb2.StepPlan()
    for sequence_id, prompt in asked.items():
        driver.start(plan, sequence_id, prompt, len(prompt))
        driver.chunk(plan, sequence_id)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "logits", poisoned)
        output = driver.run(plan)
    assert [sequence_id for sequence_id, _ in output.errors] == [1]
    for _ in range(2):
        plan = gpu_worker_pb2.StepPlan()
        for sequence_id in (0, 2):
            driver.chunk(plan, sequence_id)
        driver.run(plan)
    assert driver.tokens[0] == good.tokens[0]
    assert driver.tokens[2] == good.tokens[2]


def test_a_plan_sent_ahead_reports_the_failed_sequence_again(
    checkpoint_fp32: Path, make_rig: Any, make_driver: Any
) -> None:
    rig = make_rig(checkpoint_fp32)
    driver = make_driver(rig)
    driver.generate({0: [3, 4, 5]}, 1)
    rig.session.sequences[0].failure = "the model's logits are not finite"
    plan = gpu_worker_pb2.StepPlan(
        chunk_sequence_ids=[0],
        chunk_start_positions=[4],
        chunk_token_counts=[1],
        chunk_samples=[True],
        chunk_new_block_counts=[0],
    )
    output = driver.run(plan)
    assert output.errors == [(0, "the model's logits are not finite")]
    assert not output.sampled


def test_prompt_logprobs_cover_every_prompt_token_but_the_first(
    checkpoint_fp32: Path, make_rig: Any, make_driver: Any
) -> None:
    tokens = prompts(1, 199, 80, seed=5)[0]
    driver = make_driver(make_rig(checkpoint_fp32), chunk_tokens=13)
    driver.generate({0: tokens}, 2, prompt_logprobs=2, logprobs=1)
    described = {}
    for output in driver.outputs:
        for start, entries in output.prompt_logprobs.values():
            described.update({start + i: entry for i, entry in enumerate(entries)})
    expected = torch.log_softmax(reference_logits(checkpoint_fp32, tokens, torch.float32), dim=1)
    assert sorted(described) == list(range(1, len(tokens)))
    for position, entry in described.items():
        row = expected[position - 1]
        assert entry.token_id == tokens[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()
    assert driver.outputs[-1].logprobs[0].token_id == driver.tokens[0][-1]
    assert driver.outputs[-1].logprobs[0].top[0][0] == driver.tokens[0][-1]


@pytest.mark.parametrize("checkpoint", ["checkpoint_fp32", "checkpoint_bf16"])
def test_logits_are_equal_to_the_bit_however_the_prompt_is_cut(
    checkpoint: str,
    make_rig: Any,
    make_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    directory = request.getfixturevalue(checkpoint)
    tokens = prompts(1, 199, 200, seed=8)[0]

    def logits(chunk_tokens: int) -> Any:
        with monkeypatch.context() as patch:
            rig = make_rig(directory)
            return logits_of_all_positions(rig, make_driver, tokens, patch, chunk_tokens)

    whole = logits(10**6)
    for chunk_tokens in (1, 16, 29):
        assert torch.equal(logits(chunk_tokens), whole)
