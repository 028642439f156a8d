"""Workloads: named ones, drawn lengths, traces."""

import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import workload
from planner.errors import InvalidInputError, NotFoundError
from planner.workload import Lengths, Workload


@pytest.mark.parametrize(
    ("name", "prompt", "largest", "generated"),
    [
        ("mtbench", 98, 450, 32),
        ("mtbench-256", 98, 450, 256),
        ("rag", 926, 1843, 128),
        ("aime2024", 128, 410, 512),
    ],
)
def test_named_workloads_draw_the_published_mean_and_stay_below_the_maximum(
    name, prompt, largest, generated
):
    lengths = list(workload.named(name).lengths())
    assert statistics.mean(item.prompt_tokens for item in lengths) == pytest.approx(
        prompt, rel=0.005
    )
    assert max(item.prompt_tokens for item in lengths) <= largest
    assert min(item.prompt_tokens for item in lengths) >= 1
    assert {item.generated_tokens for item in lengths} == {generated}
    assert workload.named(name).distribution == "assumed"


@settings(max_examples=100, deadline=None)
@given(largest=st.integers(2, 2000), share=st.floats(0.02, 0.98), count=st.integers(50, 500))
def test_drawn_lengths_keep_any_mean(largest, share, count):
    mean = 1 + (largest - 1) * share
    lengths = list(Workload("w", mean, 5, count, max_prompt_tokens=largest).lengths())
    assert len(lengths) == count
    drawn = statistics.mean(item.prompt_tokens for item in lengths)
    assert drawn == pytest.approx(mean, abs=0.02 * largest + 0.5)


def test_the_same_seed_draws_the_same_lengths_and_another_does_not():
    first = Workload("w", 98, 32, 200, max_prompt_tokens=450, seed=1)
    other = Workload("w", 98, 32, 200, max_prompt_tokens=450, seed=2)
    assert list(first.lengths()) == list(first.lengths())
    assert list(first.lengths()) != list(other.lengths())


def test_a_trace_is_read_line_by_line(tmp_path):
    file = tmp_path / "calls.jsonl"
    rows = [
        {"prompt_tokens": 10, "generated_tokens": 3},
        {"prompt_tokens": 4, "generated_tokens": 9},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    trace = Workload.from_trace(file)
    assert list(trace.lengths()) == [Lengths(10, 3), Lengths(4, 9)]
    assert (trace.n_requests, trace.prompt_tokens, trace.max_sequence_tokens) == (2, 7, 13)
    assert trace.total_tokens == 26


def test_a_trace_can_be_repeated(tmp_path):
    trace = Workload.from_lengths([Lengths(1, 2), Lengths(3, 4)])
    assert [item.prompt_tokens for item in trace.with_requests(5).lengths()] == [1, 3, 1, 3, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt_tokens": 0, "generated_tokens": 3}', r":2\.prompt_tokens: .*at least 1, is 0"),
        ('{"prompt_tokens": 1}', "generated_tokens"),
        ('{"prompt_tokens": 1, "generated_token": 3}', "did you mean generated_tokens"),
        ('{"prompt_tokens": 1, "gener', "not JSON"),
        ("[1, 2]", "no JSON object"),
        ('{"prompt_tokens": true, "generated_tokens": 3}', "is True"),
    ],
)
def test_a_bad_trace_line_is_named(tmp_path, line, said):
    file = tmp_path / "calls.jsonl"
    file.write_text('{"prompt_tokens": 1, "generated_tokens": 1}\n' + line)
    with pytest.raises(InvalidInputError, match=said):
        Workload.from_trace(file)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0, 1, 1), "prompt"), ((1, 0, 1), "generate"), ((1, 1, 0), "requests")],
)
def test_lengths_below_one_are_refused(arguments, field):
    with pytest.raises(InvalidInputError) as raised:
        Workload.uniform(*arguments)
    assert raised.value.field == field


def test_a_maximum_below_the_mean_is_refused():
    with pytest.raises(InvalidInputError, match="above the mean of 98"):
        Workload("w", 98, 32, 10, max_prompt_tokens=98)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(NotFoundError, match="mtbench"):
        workload.named("mt-bench")
