"""Admission: what is taken, what is refused and why, and what a request can expect."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.admission import DEFAULT_RETRY_S, Refusal, ServerLoad, admit
from planner.costs import IterationCosts
from planner.errors import InvalidInputError
from planner.scheduler import SchedulerLimits
from planner.simulate import Request, Simulation

IDLE = ServerLoad(
    kv_capacity_tokens=1600,
    block_tokens=16,
    waiting_requests=0,
    waiting_tokens=0,
    running_requests=0,
    unfinished_tokens=0,
    max_waiting_requests=10,
    max_context_tokens=4000,
    tokens_per_s=100.0,
    kv_used_tokens=0,
    step_s=0.5,
)
BUSY = replace(
    IDLE,
    waiting_requests=5,
    waiting_tokens=1000,
    running_requests=9,
    kv_used_tokens=1200,
    unfinished_tokens=400,
)


def test_an_idle_server_takes_a_request_at_once():
    answer = admit(IDLE, 100, 20)
    assert answer.admitted
    assert (answer.wait_s, answer.total_s) == (0.0, 10.0)
    assert answer.generated_tokens_per_s == 2.0


def test_a_full_server_tells_how_long_the_queue_takes():
    answer = admit(BUSY, 100, 20)
    assert answer.admitted
    assert answer.wait_s == (1000 + 120) / 100
    assert answer.total_s == answer.wait_s + 10


def test_nobody_waits_while_everything_fits_the_kv():
    roomy = replace(BUSY, kv_capacity_tokens=1200 + 400 + 1000 + 120)
    assert admit(roomy, 100, 20).wait_s == 0.0
    assert admit(roomy, 101, 20).wait_s == 1 / 100


def test_what_exceeds_the_context_is_refused_for_ever():
    assert admit(replace(IDLE, kv_capacity_tokens=10**6), 3990, 10).admitted
    answer = admit(IDLE, 3990, 11)
    assert answer.refusal is Refusal.CONTEXT
    assert answer.retry_after_s is None
    assert "3990" in answer.reason and "4000" in answer.reason


def test_what_exceeds_the_kv_is_refused_for_ever():
    assert admit(IDLE, 1590, 11).admitted  # the last token needs no KV
    answer = admit(IDLE, 1590, 12)
    assert answer.refusal is Refusal.KV_CAPACITY
    assert answer.retry_after_s is None
    assert "1616 tokens of KV; the pool holds 1600" in answer.reason


def test_a_full_queue_says_when_there_is_room():
    full = replace(BUSY, waiting_requests=10, waiting_tokens=5000)
    answer = admit(full, 100, 20)
    assert answer.refusal is Refusal.QUEUE_FULL
    assert answer.retry_after_s == 5000 / 10 / 100  # one of the waiting has started
    unknown = admit(replace(full, tokens_per_s=None), 100, 20)
    assert unknown.retry_after_s == DEFAULT_RETRY_S


def test_a_wait_beyond_the_callers_patience_is_refused():
    answer = admit(BUSY, 100, 20, max_wait_s=5.0)
    assert answer.refusal is Refusal.TOO_SLOW
    assert answer.retry_after_s == answer.wait_s - 5.0
    assert admit(BUSY, 100, 20, max_wait_s=12.0).admitted


def test_unknown_speed_is_no_guess():
    unknown = replace(BUSY, tokens_per_s=None, step_s=None)
    answer = admit(unknown, 100, 20)
    assert answer.admitted
    assert (answer.wait_s, answer.total_s, answer.generated_tokens_per_s) == (None, None, None)


def test_unknown_kv_use_takes_an_empty_queue_for_room():
    assert admit(replace(BUSY, kv_used_tokens=None), 100, 20).wait_s == 1000 / 100
    empty = replace(BUSY, kv_used_tokens=None, waiting_requests=0, waiting_tokens=0)
    assert admit(empty, 100, 20).wait_s == 0.0


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 30), st.integers(0, 10**4), st.integers(1, 3000), st.integers(1, 1500))
def test_more_load_never_waits_less_and_refusals_name_the_cause(waiting, tokens, prompt, limit):
    load = replace(BUSY, waiting_requests=waiting, waiting_tokens=tokens)
    answer = admit(load, prompt, limit)
    assert answer.admitted == (answer.reason == "")
    if answer.refusal in (Refusal.CONTEXT, Refusal.KV_CAPACITY):
        assert answer.retry_after_s is None
        return
    assert (answer.refusal is Refusal.QUEUE_FULL) == (waiting >= load.max_waiting_requests)
    assert (answer.retry_after_s is None) == answer.admitted
    busier = admit(replace(load, waiting_tokens=tokens + 100), prompt, limit)
    assert busier.wait_s == pytest.approx(answer.wait_s + 1, abs=1.01)
    assert busier.wait_s >= answer.wait_s


@pytest.mark.parametrize("queued", [50, 200, 400])
def test_the_wait_is_what_the_simulation_sees(queued):
    """A request behind a queue of equals, once the KV is full: within a fifth of when it starts."""
    prompt, generate, kv_blocks = 50, 30, 300
    simulation = Simulation(
        [Request(prompt, generate)] * (queued + 60),
        IterationCosts.constant(1.0),
        SchedulerLimits(10_000),
        kv_blocks=kv_blocks,
    )
    steps = list(simulation.run())
    result = simulation.result(steps)
    # The state in which exactly `queued` requests wait for the first time once the pool is full.
    now = next(step for step in steps if step.waiting <= queued and step.kv_blocks > 290)
    started_s = next(step.start_s for step in steps if step.waiting == 0)
    running_tokens = now.running * (prompt + generate)
    load = ServerLoad(
        kv_capacity_tokens=kv_blocks * 16,
        block_tokens=16,
        waiting_requests=now.waiting - 1,
        waiting_tokens=(now.waiting - 1) * (prompt + generate),
        running_requests=now.running,
        unfinished_tokens=running_tokens - now.kv_blocks * 16,
        max_waiting_requests=10_000,
        max_context_tokens=4096,
        tokens_per_s=result.tokens_per_s,
        kv_used_tokens=now.kv_blocks * 16,
    )
    expected_s = started_s - now.start_s
    assert admit(load, prompt, generate).wait_s == pytest.approx(expected_s, rel=0.2)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kv_capacity_tokens", 0),
        ("block_tokens", 0),
        ("waiting_requests", -1),
        ("tokens_per_s", 0.0),
        ("tokens_per_s", float("nan")),
        ("step_s", -1.0),
    ],
)
def test_a_load_that_makes_no_sense_names_its_field(field, change):
    with pytest.raises(InvalidInputError, match=field):
        replace(IDLE, **{field: change})


@pytest.mark.parametrize(("field", "lengths"), [("prompt_tokens", (0, 1)), ("max_tokens", (1, 0))])
def test_a_request_that_makes_no_sense_names_its_field(field, lengths):
    with pytest.raises(InvalidInputError, match=field):
        admit(IDLE, *lengths)
