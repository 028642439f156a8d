"""Fitting a machine to observed steps: what was put in comes out."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.calibrate import ObservedStep, calibrate, calibrate_overheads
from planner.costs import IterationCosts, PiecewiseLine, StepLoad
from planner.errors import InvalidInputError

HARDWARE = catalogue.hardware("a40-xeon8380")
LAYERS = 32


def steps(a0, a1, attention_rate, sequence_s, link_rate, kappa, count=40, noise=0.0, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        tokens, sequences = rng.randint(100, 20_000), rng.randint(10, 4_000)
        kv_bytes, weights = rng.uniform(1e8, 1e11), rng.choice([90e9, 45e9])
        attention_s = kv_bytes / attention_rate + sequence_s * sequences * LAYERS
        jitter = 1 + noise * rng.uniform(-1, 1)
        yield ObservedStep(
            tokens=tokens,
            sequences=sequences,
            kv_read_bytes=kv_bytes,
            weights_streamed_bytes=weights,
            link_s=(weights / link_rate + kappa * attention_s) * jitter,
            device_s=LAYERS * (a0 + a1 * tokens) * jitter,
            attention_s=attention_s,
        )


@settings(max_examples=50, deadline=None)
@given(fixed_s=st.floats(0, 1), sequence_s=st.floats(1e-4, 1e-1), seed=st.integers(0, 100))
def test_overheads_are_found_where_they_are_not_hidden(fixed_s, sequence_s, seed):
    rng = random.Random(seed)
    compute = PiecewiseLine.affine(1.0, 0.01)
    costs = IterationCosts(4, 64.0, compute, link_h2d_bytes_per_s=1e3)
    real = replace(costs, overhead_fixed_s=fixed_s, overhead_sequence_s=sequence_s)
    loads = [StepLoad(n, n, n, n) for n in (1, 3, 10, 40) for _ in range(3)]
    observed = [(load, real.iteration(load).total_s) for load in loads]
    observed.append((loads[0], 1e3))  # one that was disturbed
    rng.shuffle(observed)
    found = calibrate_overheads(costs, observed)
    assert found["step_overhead_s"] == pytest.approx(fixed_s, abs=1e-6)
    assert found["step_overhead_sequence_s"] == pytest.approx(sequence_s, rel=1e-3)
    hidden = replace(costs, link_h2d_bytes_per_s=1.0)
    assert calibrate_overheads(hidden, observed) == {}


@settings(max_examples=100, deadline=None)
@given(
    a0=st.floats(1e-5, 1e-2),
    a1=st.floats(1e-7, 1e-5),
    attention=st.floats(1e10, 5e11),
    link=st.floats(1e9, 1e11),
    kappa=st.floats(0, 1),
)
def test_exact_steps_give_back_the_machine(a0, a1, attention, link, kappa):
    observed = list(steps(a0, a1, attention, 1e-7, link, kappa))
    fitted, fits = calibrate(HARDWARE, LAYERS, observed, "m")
    assert fitted.require("device_time_fixed_s") == pytest.approx(a0, rel=1e-4)
    assert fitted.require("device_time_per_token_s") == pytest.approx(a1, rel=1e-4)
    assert fitted.require("attention_bytes_per_s") == pytest.approx(attention, rel=1e-4)
    assert fitted.require("link_h2d_bytes_per_s") == pytest.approx(link, rel=1e-4)
    assert fitted.require("link_slowdown") == pytest.approx(kappa, rel=1e-3, abs=1e-4)
    assert {fit.term for fit in fits} == {"device", "attention", "link"}
    assert all(fit.mean_error_share < 1e-6 for fit in fits)


def test_noise_shows_in_the_error_and_the_source():
    observed = list(steps(1e-3, 1e-6, 1e11, 0, 2e10, 0.5, noise=0.1))
    fitted, fits = calibrate(HARDWARE, LAYERS, observed, "m")
    device = next(fit for fit in fits if fit.term == "device")
    assert 0.01 < device.mean_error_share < 0.1
    assert fitted.device_time_per_token_s.provenance == "measured"
    assert "40 steps" in fitted.device_time_per_token_s.source
    assert fitted.profiled_model == "m"


def test_what_was_not_observed_stays_as_it_was():
    observed = [ObservedStep(t, 1, 0, 0, 0, 0.01 + t * 1e-6, 0) for t in (10, 20, 30, 40)]
    fitted, fits = calibrate(HARDWARE, LAYERS, observed, "m")
    assert [fit.term for fit in fits] == ["device"]
    assert fitted.link_h2d_bytes_per_s == HARDWARE.link_h2d_bytes_per_s
    assert fitted.attention_bytes_per_s == HARDWARE.attention_bytes_per_s


def test_no_coefficient_is_negative():
    # Device time that falls with tokens: nonsense that noise can make.
    observed = [ObservedStep(t, 1, 0, 0, 0, 1 - t * 1e-3, 0) for t in (10, 200, 400, 800)]
    fitted, _ = calibrate(HARDWARE, LAYERS, observed, "m")
    assert fitted.require("device_time_per_token_s") == 0
    assert fitted.require("device_time_fixed_s") > 0


@pytest.mark.parametrize("count", [0, 3])
def test_too_few_steps_are_refused(count):
    observed = list(steps(1e-3, 1e-6, 1e11, 0, 2e10, 0.5, count=count))
    with pytest.raises(InvalidInputError, match="at least 4 steps"):
        calibrate(HARDWARE, LAYERS, observed, "m")


def test_equal_steps_determine_no_line():
    same = [ObservedStep(100, 1, 0, 0, 0, 0.5, 0)] * 10
    with pytest.raises(InvalidInputError, match="different sizes"):
        calibrate(HARDWARE, LAYERS, same, "m")


def test_a_negative_duration_is_named():
    with pytest.raises(InvalidInputError, match=r"steps\.device_s"):
        ObservedStep(1, 1, 0, 0, 0, -1, 0)
