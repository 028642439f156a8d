"""The pipeline: two groups, streamed weights, attention split between device and CPU worker."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moelens.v1 import gpu_worker_pb2

from gpu_worker.groups import ChunkCosts, split
from gpu_worker.own_attention import causal_by_chunk, merge
from gpu_worker.session import Chunk


def prompts(n: int, longest: int, seed: int = 0) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(0, 199, size=rng.integers(1, longest + 1)).tolist() for i in range(n)}


@pytest.fixture
def sequential(checkpoint_fp32: Path, make_rig: Any, make_driver: Any) -> dict[int, list[int]]:
    """What the sequential engine generates."""
    driver = make_driver(make_rig(checkpoint_fp32), chunk_tokens=24)
    driver.generate(prompts(7, 80), 6)
    return dict(driver.tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"link_bytes_per_s": 1e9, "resident_bytes": 0},
        {"link_bytes_per_s": 2e8, "resident_bytes": 0, "packet_bytes": 4096},
        {"link_bytes_per_s": 2e8, "resident_bytes": 200_000},
        {"link_bytes_per_s": 2e8, "resident_bytes": 10**9},
        {"link_bytes_per_s": 2e8, "resident_bytes": 0, "pipelined": False},
    ],
)
def test_results_equal_the_sequential_engines_to_the_bit(
    options: dict[str, Any],
    sequential: dict[int, list[int]],
    checkpoint_fp32: Path,
    make_rig: Any,
    make_driver: Any,
) -> None:
    rig = make_rig(checkpoint_fp32, **{"pipelined": True, **options})
    driver = make_driver(rig, chunk_tokens=24)
    driver.generate(prompts(7, 80), 6)
    assert driver.tokens == sequential
    order = [s.sequence_id for s, _ in driver.outputs[-1].sampled]
    assert order == sorted(order)


@pytest.mark.parametrize("options", [{}, {"link_bytes_per_s": 1e9, "resident_bytes": 0}])
def test_attention_inside_chunks_on_the_device_gives_the_same_tokens(
    options: dict[str, Any],
    sequential: dict[int, list[int]],
    checkpoint_fp32: Path,
    make_rig: Any,
    make_driver: Any,
) -> None:
    rig = make_rig(checkpoint_fp32, pipelined=True, chunks_on_device=True, **options)
    driver = make_driver(rig, chunk_tokens=24)
    driver.generate(prompts(7, 80), 6)
    assert driver.tokens == sequential


def test_a_pass_that_was_given_up_does_not_disturb_the_next(
    sequential: dict[int, list[int]],
    checkpoint_fp32: Path,
    make_rig: Any,
    make_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig(checkpoint_fp32, pipelined=True, link_bytes_per_s=2e8, resident_bytes=0)

    def dead(slot: int, timeout_s: float) -> Any:
        raise ConnectionError("attention process 0 died")

    driver = make_driver(rig)
    for waits in range(3):
        plan = gpu_worker_pb2.StepPlan(step_id=1)
        driver.start(plan, 100 + waits, [1, 2, 3], 3)
        driver.chunk(plan, 100 + waits)
        with monkeypatch.context() as patch, pytest.raises(ConnectionError):
            real = rig.port.wait
            calls = iter([real] * waits + [dead])
            patch.setattr(rig.port, "wait", lambda *a, calls=calls: next(calls)(*a))
            driver.run(plan)
    plan = gpu_worker_pb2.StepPlan(step_id=9, released_sequence_ids=[100, 101, 102])
    rig.session.apply(plan)
    driver = make_driver(rig, chunk_tokens=24)
    driver.generate(prompts(7, 80), 6)
    assert driver.tokens == sequential


def test_streamed_bytes_and_idle_times_are_accounted(
    checkpoint_fp32: Path, make_rig: Any, make_driver: Any
) -> None:
    rig = make_rig(checkpoint_fp32, pipelined=True, link_bytes_per_s=2e7, resident_bytes=0)
    driver = make_driver(rig)
    begin_s = time.monotonic()
    driver.generate(prompts(4, 30), 6)
    wall_s = time.monotonic() - begin_s
    moved = sum(output.times.weights_streamed_bytes for output in driver.outputs)
    one_pass = sum(len(rig.store.stage_bytes(i)) for i in range(3))
    # The mover is ahead by up to two stages.
    assert 6 * one_pass - 2 * one_pass / 3 <= moved <= 6 * one_pass + one_pass
    # No faster than the link; a step alone may be, for which the mover had worked ahead.
    assert wall_s >= (moved - one_pass) / 2e7
    for output in driver.outputs[1:]:
        assert output.times.idle_link_s > 0.5 * output.times.total_s


def test_the_timeline_has_rows_for_link_device_and_attention(
    checkpoint_fp32: Path, make_rig: Any, make_driver: Any, tmp_path: Path
) -> None:
    import json

    rig = make_rig(
        checkpoint_fp32, pipelined=True, link_bytes_per_s=2e8, resident_bytes=0, timeline=True
    )
    make_driver(rig).generate(prompts(3, 30), 3)
    rig.timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {"device", "link", "attention process 0"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"GA 0 α", "GB 2 β", "weights 1"} <= names


# -- pieces ---------------------------------------------------------------------------------------


class FakeSequence:
    pass


def chunk(start: int, count: int) -> Chunk:
    return Chunk(FakeSequence(), start, count, True)  # type: ignore[arg-type]


def test_groups_cost_the_same_and_keep_the_order() -> None:
    rng = np.random.default_rng(3)
    chunks = [chunk(int(rng.integers(0, 2000)), 1) for _ in range(60)]
    chunks += [chunk(0, int(rng.integers(2, 300))) for _ in range(8)]
    costs = ChunkCosts(device_s_per_token=1e-5, attention_s_per_kv_token=1e-6)
    alpha, beta = split(chunks, costs)
    totals = [sum(costs.of(c) for c in group) for group in (alpha, beta)]
    assert max(totals) / min(totals) < 1.02
    for group in (alpha, beta):
        positions = [next(i for i, c in enumerate(chunks) if c is member) for member in group]
        assert positions == sorted(positions)
    assert len(alpha) + len(beta) == len(chunks)


def test_a_single_chunk_is_one_group() -> None:
    assert len(split([chunk(0, 5)], ChunkCosts())) == 1


def exact_attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Float64, one head at a time."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + len(k) - len(q))
        out[:, head] = scores.masked_fill(hidden, -torch.inf).softmax(1) @ v[:, head // group]
    return out


@pytest.mark.parametrize("counts", [[1], [300], [5, 1, 270, 64]])
def test_attention_inside_chunks_is_exact(counts: list[int]) -> None:
    torch.manual_seed(0)
    n = sum(counts)
    q, k, v = torch.randn(n, 6, 32), torch.randn(n, 2, 32), torch.randn(n, 2, 32)
    out, lse = causal_by_chunk(q, k, v, counts, 0.2)
    assert torch.isfinite(lse).all()
    start = 0
    for count in counts:
        rows = slice(start, start + count)
        expected = exact_attention(q[rows].double(), k[rows].double(), v[rows].double(), 0.2)
        error = torch.linalg.norm(out[rows] - expected) / torch.linalg.norm(expected)
        assert error < 1e-6
        start += count


def test_two_parts_merge_to_attention_over_both() -> None:
    torch.manual_seed(1)
    n, earlier = 9, 31
    q = torch.randn(n, 4, 16)
    k, v = torch.randn(earlier + n, 4, 16), torch.randn(earlier + n, 4, 16)
    own = causal_by_chunk(q, k[earlier:], v[earlier:], [n], 0.3)
    scores = torch.einsum("qhd,khd->qhk", q, k[:earlier]) * 0.3
    before = (torch.einsum("qhk,khd->qhd", scores.softmax(2), v[:earlier]), scores.logsumexp(2))
    expected = exact_attention(q.double(), k.double(), v.double(), 0.3)
    assert torch.allclose(merge(before, own).double(), expected, atol=1e-6)
    nothing = (torch.zeros(n, 4, 16), torch.full((n, 4), -torch.inf))
    assert torch.equal(merge(nothing, own), own[0])
