"""Plans that contradict the session are refused with the field, and change nothing."""

import copy
from typing import Any

import pytest
from moelens.v1 import common_pb2, gpu_worker_pb2

from gpu_worker.errors import PlanError
from gpu_worker.session import Session, SessionLimits

LIMITS = SessionLimits(
    vocab_size=100, max_context_tokens=64, max_step_tokens=40, max_sequences=2, kv_blocks=6
)


def start(sequence_id: int, n_tokens: int, **fields: Any) -> gpu_worker_pb2.SequenceStart:
    values = {
        "sequence_id": sequence_id,
        "token_ids": list(range(n_tokens)),
        "prompt_tokens": n_tokens,
        "sampling": common_pb2.SamplingParams(seed=1),
        **fields,
    }
    return gpu_worker_pb2.SequenceStart(**values)


def plan(*chunks: tuple[int, int, int, bool, list[int]], **fields: Any) -> Any:
    """Chunks are (sequence, start, count, samples, new blocks)."""
    message = gpu_worker_pb2.StepPlan(step_id=1, **fields)
    for sequence_id, start_position, count, samples, blocks in chunks:
        message.chunk_sequence_ids.append(sequence_id)
        message.chunk_start_positions.append(start_position)
        message.chunk_token_counts.append(count)
        message.chunk_samples.append(samples)
        message.chunk_new_block_counts.append(len(blocks))
        message.new_blocks.extend(blocks)
    return message


@pytest.fixture
def blocks_set() -> list[tuple[int, int, list[int]]]:
    return []


@pytest.fixture
def session(blocks_set: list[tuple[int, int, list[int]]]) -> Session:
    """Sequence 1 with 20 tokens, of which 16 are computed in block 5."""
    made = Session(LIMITS, lambda row, first, blocks: blocks_set.append((row, first, blocks)))
    made.apply(plan((1, 0, 16, False, [5]), starts=[start(1, 20)]))
    return made


def test_a_good_plan_continues_the_sequence(session: Session, blocks_set: list[Any]) -> None:
    batch = session.apply(
        plan((1, 16, 4, True, [0]), (2, 0, 17, True, [1, 2]), starts=[start(2, 17)])
    )
    assert [(c.start, c.count, c.samples) for c in batch.chunks] == [(16, 4, True), (0, 17, True)]
    rows = [c.sequence.row for c in batch.chunks]
    assert blocks_set == [(rows[0], 0, [5]), (rows[0], 1, [0]), (rows[1], 0, [1, 2])]


def test_released_rows_and_blocks_serve_again(session: Session) -> None:
    batch = session.apply(
        plan((3, 0, 16, True, [5]), released_sequence_ids=[1], starts=[start(3, 16)])
    )
    assert batch.chunks[0].sequence.blocks == [5]
    assert list(session.sequences) == [3]


def test_a_released_sequence_may_start_again_in_the_same_plan(session: Session) -> None:
    again = plan((1, 0, 20, True, [5, 4]), released_sequence_ids=[1], starts=[start(1, 20)])
    assert session.apply(again).chunks[0].sequence.computed_tokens == 20


GOOD = (1, 16, 4, True, [0])


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (plan(GOOD, released_sequence_ids=[9]), "plan.released_sequence_ids"),
        (plan(GOOD, starts=[start(1, 3)]), "plan.starts[0].sequence_id"),
        (plan(GOOD, starts=[start(2, 3), start(2, 3)]), "plan.starts[1].sequence_id"),
        (plan(GOOD, starts=[start(2, 3), start(3, 3)]), "plan.starts"),
        (plan(GOOD, starts=[start(2, 0)]), "plan.starts[0].token_ids"),
        (plan(GOOD, starts=[start(2, 65)]), "plan.starts[0].token_ids"),
        (plan(GOOD, starts=[start(2, 1, token_ids=[100])]), "plan.starts[0].token_ids"),
        (plan(GOOD, starts=[start(2, 3, prompt_tokens=0)]), "plan.starts[0].prompt_tokens"),
        (plan(GOOD, starts=[start(2, 3, prompt_tokens=4)]), "plan.starts[0].prompt_tokens"),
        (plan((7, 0, 1, True, [0])), "plan.chunk_sequence_ids[0]"),
        (plan(GOOD, GOOD), "plan.chunk_sequence_ids"),
        (plan((1, 15, 5, True, [0])), "plan.chunk_start_positions[0]"),
        (plan((1, 16, 0, True, [])), "plan.chunk_token_counts[0]"),
        (plan((1, 16, 5, True, [0])), "plan.chunk_token_counts[0]"),
        (plan((1, 16, 4, False, [0])), "plan.chunk_samples[0]"),
        (plan((1, 16, 3, True, [0])), "plan.chunk_samples[0]"),
        (plan((1, 16, 4, True, [])), "plan.chunk_new_block_counts[0]"),
        (plan((1, 16, 4, True, [0, 1])), "plan.chunk_new_block_counts[0]"),
        (plan((1, 16, 4, True, [6])), "plan.new_blocks"),
        (plan((1, 16, 4, True, [5])), "plan.new_blocks"),
        (
            plan(GOOD, (2, 0, 3, True, [0]), starts=[start(2, 3)]),
            "plan.new_blocks",
        ),
        (
            plan((2, 0, 41, True, [0, 1, 2]), starts=[start(2, 41)]),
            "plan.chunk_token_counts",
        ),
    ],
)
def test_a_contradiction_is_named_and_nothing_changes(
    session: Session, bad: Any, field: str
) -> None:
    before = copy.deepcopy({i: vars(s) for i, s in session.sequences.items()})
    with pytest.raises(PlanError) as caught:
        session.apply(bad)
    assert caught.value.field == field
    after = {i: vars(s) for i, s in session.sequences.items()}
    assert after.keys() == before.keys()
    assert after[1]["blocks"] == [5]
    assert after[1]["computed_tokens"] == 16
    session.apply(plan(GOOD))


def test_arrays_of_different_length_are_refused(session: Session) -> None:
    message = plan(GOOD)
    message.chunk_samples.append(True)
    with pytest.raises(PlanError, match=r"chunk_samples: has 2 entries"):
        session.apply(message)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"temperature": float("nan"), "seed": 1}, "temperature"),
        ({"temperature": -1.0, "seed": 1}, "temperature"),
        ({"top_p": 1.5, "seed": 1}, "top_p"),
        ({"min_p": -0.1, "seed": 1}, "min_p"),
        ({"presence_penalty": 3.0, "seed": 1}, "presence_penalty"),
        ({"repetition_penalty": 0.0, "seed": 1}, "repetition_penalty"),
        ({"logit_bias": {100: 1.0}, "seed": 1}, "logit_bias"),
        ({"logit_bias": {1: 101.0}, "seed": 1}, "logit_bias"),
        ({"stop_token_ids": [100], "seed": 1}, "stop_token_ids"),
        ({}, "seed"),
    ],
)
def test_sampling_parameters_out_of_range_are_named(
    session: Session, parameters: dict[str, Any], field: str
) -> None:
    bad = start(2, 3, sampling=common_pb2.SamplingParams(**parameters))
    with pytest.raises(PlanError) as caught:
        session.apply(plan(starts=[bad]))
    assert caught.value.field == f"plan.starts[0].sampling.{field}"
