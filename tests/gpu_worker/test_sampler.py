"""The sampler against plain definitions: softmax over what truncation leaves."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.sampler import NotFinite, Sampling, choose, token_logprob, uniform

PROMPT = np.array([3, 4, 5], dtype=np.int64)


def logits_of(seed: int, n: int = 40) -> Any:
    return np.random.default_rng(seed).normal(scale=2.0, size=n).astype(np.float32)


def frequencies(logits: Any, sampling: Sampling, n: int) -> Any:
    """How often each token is chosen, over n seeds."""
    counts = np.zeros(len(logits))
    for seed in range(n):
        counts[choose(logits, dataclasses.replace(sampling, seed=seed), PROMPT, 3)] += 1
    return counts / n


def expected_distribution(logits: Any, sampling: Sampling) -> Any:
    """By definition, token by token, in float64."""
    p = torch.softmax(torch.from_numpy(logits).double() / sampling.temperature, dim=0)
    keep = p >= sampling.min_p * p.max()
    if sampling.top_k:
        keep &= p >= p.masked_fill(~keep, 0).topk(sampling.top_k).values[-1]
    p = p.masked_fill(~keep, 0) / p[keep].sum()
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return (p / p.sum()).numpy()


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 10, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_truncated_distribution(parameters: dict[str, Any]) -> None:
    sampling = Sampling(seed=0, **parameters)
    logits = logits_of(1)
    n = 4000
    expected = expected_distribution(logits, sampling)
    found = frequencies(logits, sampling, n)
    assert not found[expected == 0].any()
    # Each count is binomial; five standard deviations.
    bound = 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9
    assert (abs(found - expected) <= bound).all()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.array([1, 7, 3, 7], dtype=np.float32)
    assert choose(logits, Sampling(seed=0, temperature=0.0), PROMPT, 3) == 1
    assert choose(logits, Sampling(seed=0, top_k=1), PROMPT, 3) == 1


def test_a_choice_depends_on_seed_and_position_alone() -> None:
    logits = logits_of(2)
    again = {choose(logits, Sampling(seed=9), PROMPT, 3) for _ in range(5)}
    assert len(again) == 1
    other_tokens = np.array([9, 9, 9], dtype=np.int64)
    assert choose(logits, Sampling(seed=9), other_tokens, 3) in again
    draws = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(draws) == 400
    assert all(0 <= u < 1 for u in draws)


def test_logit_bias_and_minimum_length() -> None:
    logits = logits_of(3)
    greedy = {"seed": 0, "temperature": 0.0}
    best = int(np.argmax(logits))
    assert choose(logits, Sampling(**greedy, logit_bias={7: 100.0}), PROMPT, 3) == 7
    early = Sampling(**greedy, min_tokens=1, stop_token_ids=(best,))
    assert choose(logits, early, PROMPT, 3) != best
    assert choose(logits, early, np.append(PROMPT, 1), 3) == best


def test_penalties_are_those_of_their_definitions() -> None:
    logits = np.array([2.0, -2.0, 1.9, 0.0, 0.0], dtype=np.float32)
    tokens = np.array([1, 0, 0], dtype=np.int64)  # prompt 1, generated 0, 0

    def best(**penalties: float) -> int:
        return choose(logits, Sampling(seed=0, temperature=0.0, **penalties), tokens, 1)

    assert best() == 0
    assert best(presence_penalty=0.2) == 2  # 2.0 - 0.2 < 1.9
    assert best(presence_penalty=0.05) == 0
    assert best(frequency_penalty=0.06) == 2  # 2.0 - 2 · 0.06 < 1.9
    assert best(frequency_penalty=0.04) == 0
    assert best(repetition_penalty=1.1) == 2  # 2.0 / 1.1 < 1.9
    assert best(repetition_penalty=1.04) == 0


def test_logits_are_not_changed_in_place() -> None:
    logits = logits_of(4)
    before = logits.copy()
    choose(logits, Sampling(seed=1, logit_bias={1: 5.0}, repetition_penalty=1.3), PROMPT, 3)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = logits_of(5)
    logits[11] = bad
    with pytest.raises(NotFinite):
        choose(logits, Sampling(seed=1), PROMPT, 3)
    with pytest.raises(NotFinite):
        token_logprob(logits, 1, 2)


def test_nothing_left_to_choose_is_an_error() -> None:
    with pytest.raises(NotFinite):
        all_stop = tuple(range(40))
        sampling = Sampling(seed=1, min_tokens=1, stop_token_ids=all_stop)
        choose(logits_of(6), sampling, PROMPT, 3)


def test_top_p_beyond_the_first_candidates_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_worker import sampler

    logits = logits_of(7, n=500)
    sampling = Sampling(seed=0, top_p=0.95, temperature=3.0)
    wanted = [choose(logits, dataclasses.replace(sampling, seed=s), PROMPT, 3) for s in range(200)]
    monkeypatch.setattr(sampler, "TOP_P_CANDIDATES", (4, 17))
    found = [choose(logits, dataclasses.replace(sampling, seed=s), PROMPT, 3) for s in range(200)]
    assert found == wanted


def test_logprobs_are_log_softmax() -> None:
    logits = logits_of(8)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=0)
    entry = token_logprob(logits, 6, 3)
    assert entry.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    assert [i for i, _ in entry.top] == expected.topk(3).indices.tolist()
    assert [p for _, p in entry.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)
    assert token_logprob(logits, 6, 0).top == ()
