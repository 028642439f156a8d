"""Bounds of steps, and their size."""

import pytest

from gateway.patience import FACTOR, SELF_END_FACTOR, Patience
from gateway.step_size import FEWEST_TOKENS, STEPS_BEFORE_GROWTH, StepSize
from planner.blocks import BlockPool
from planner.scheduler import Scheduler, SchedulerLimits


def test_bound_follows_the_prediction_between_least_and_most() -> None:
    patience = Patience(least_s=5.0, most_s=120.0)
    assert patience.step_s == 120.0  # nothing is known
    for predicted_s, bound_s in ((0.01, 5.0), (1.0, FACTOR), (60.0, 120.0)):
        patience.predicted_step_s = predicted_s
        assert patience.step_s == bound_s
        assert patience.worker_step_s == SELF_END_FACTOR * bound_s


def test_steps_longer_than_predicted_raise_the_bound_for_a_while() -> None:
    patience = Patience(least_s=1.0, most_s=120.0, predicted_step_s=0.1)
    patience.note(0.5)
    assert patience.step_s == pytest.approx(FACTOR * 0.5)
    for _ in range(10_000):
        patience.note(0.01)
    assert patience.step_s == pytest.approx(FACTOR * 0.1)


def test_steps_shrink_by_halves_and_grow_back_after_many_that_fit() -> None:
    scheduler = Scheduler(BlockPool(64, 16), SchedulerLimits(max_step_tokens=100))
    size = StepSize()
    sizes = []
    while size.shrink(scheduler):
        sizes.append(scheduler.limits.max_step_tokens)
    assert sizes == [50, 25, FEWEST_TOKENS]
    grown = []
    for _ in range(4 * STEPS_BEFORE_GROWTH):
        size.note_success(scheduler)
        grown.append(scheduler.limits.max_step_tokens)
    assert sorted(set(grown)) == [16, 32, 64, 100]
    assert grown[-1] == 100
