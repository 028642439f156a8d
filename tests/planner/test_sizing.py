"""Sizing: the machine it returns reaches the target in an estimate, a slightly smaller one not."""

import random
from dataclasses import replace

import pytest

from planner import catalogue
from planner.errors import InvalidInputError
from planner.estimate import Detail, estimate
from planner.inputs import CaseInputs
from planner.sizing import (
    GPU_MEMORY,
    HOST_MEMORY,
    LINK,
    RESOURCES,
    Figure,
    Problem,
    Target,
    least,
    least_gpus,
    size,
)
from planner.units import parse_bytes
from planner.workload import Workload

MIXTRAL = catalogue.model("mixtral-8x7b")
TESTBED = catalogue.hardware("a40-xeon8380")
MTBENCH = Workload.uniform(98, 64, 20_000)
MACHINES = ["a40-xeon8380", "rtx4090-desktop", "rtx3090-desktop", "l4-gcp-g2", "h100-server"]


def problem(target=1500.0, hardware=TESTBED, **more) -> Problem:
    return Problem(MIXTRAL, hardware, MTBENCH, target, **more)


def random_problem(rng: random.Random) -> Problem:
    """A machine and workload with a target that the machine reaches if one resource is grown."""
    workload = Workload.uniform(
        rng.randint(16, 1500), rng.randint(8, 400), rng.randint(500, 50_000)
    )
    machine = catalogue.hardware(rng.choice(MACHINES))
    base = Problem(MIXTRAL, machine, workload, 1.0)
    most = base.with_amount(HOST_MEMORY, 4e12).outcome().tokens_per_s
    return replace(base, target_tokens_per_s=most * rng.uniform(0.02, 0.98))


@pytest.mark.parametrize("seed", range(200))
def test_the_least_resource_reaches_the_target_and_5_percent_less_does_not(seed):
    rng = random.Random(seed)
    asked = random_problem(rng)
    resource = HOST_MEMORY if seed < 120 else rng.choice(RESOURCES)
    option = least(asked, resource)
    if option.least is None or option.why:
        # Nothing of this resource does it, or its least amount tried does: said, and true.
        present = resource.present(asked.hardware)
        edge = asked.with_amount(resource, present * (64 if option.least is None else 1 / 64))
        assert edge.reached() == (option.least is not None)
        assert option.why
        return
    found = asked.with_amount(resource, option.least)
    rate = estimate(found.case(), Detail.NONE).steady.tokens_per_s
    assert rate == pytest.approx(option.tokens_per_s)
    assert rate >= asked.target_tokens_per_s
    assert not asked.with_amount(resource, option.least * 0.95).reached()


def test_the_command_line_agrees_with_the_library():
    option = least(problem(), HOST_MEMORY)
    inputs = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "64", "20000", ram=str(option.least))
    assert parse_bytes(str(option.least)) == round(option.least)
    assert estimate(inputs.case(), Detail.NONE).steady.tokens_per_s >= 1500 * (1 - 1e-6)


@pytest.mark.parametrize("figure", [Figure.STAGE2, Figure.SIMULATION])
def test_other_figures_can_be_the_ones_that_count(figure):
    workload = Workload.uniform(98, 64, 3000)
    asked = Problem(MIXTRAL, TESTBED, workload, 900.0, figure=figure)
    option = least(asked, HOST_MEMORY)
    found = estimate(asked.with_amount(HOST_MEMORY, option.least).case(), figure.detail)
    assert figure.of(found).tokens_per_s >= 900
    assert not asked.with_amount(HOST_MEMORY, option.least * 0.95).reached()


def test_a_target_that_no_amount_reaches_says_what_limits():
    option = least(problem(1e6), HOST_MEMORY)
    assert option.least is None
    assert "limited by GPU compute" in option.why


def test_a_faster_link_does_not_help_where_the_gpu_is_the_limit():
    limited = problem(3780.0).with_amount(HOST_MEMORY, 2e12)
    assert least(replace(limited, target_tokens_per_s=5000.0), LINK).least is None


def test_gpu_memory_is_spent_on_resident_layers():
    asked = problem(1800.0, hardware=TESTBED.with_values("assumed", "", host_memory_bytes=168e9))
    option = least(asked, GPU_MEMORY)
    found = estimate(asked.with_amount(GPU_MEMORY, option.least).case(), Detail.NONE)
    assert found.memory.resident_layers > 0
    assert found.memory.gpu.fits


def test_the_fewest_gpus_are_found():
    option = least_gpus(problem(5000.0))
    assert option.least > 1
    for count, reached in ((option.least, True), (option.least - 1, False)):
        machine = replace(TESTBED, gpu_count=int(count))
        assert problem(5000.0, hardware=machine).reached() is reached
    assert least_gpus(problem(1e6)).least is None


def test_changes_are_ordered_by_gain_and_true():
    found = size(problem(), machines=False)
    gains = [change.gain_share for change in found.changes if change.gain_share is not None]
    assert gains == sorted(gains, reverse=True)
    link = next(c for c in found.changes if c.change == "a link twice as fast")
    twice = problem().with_amount(LINK, 2 * TESTBED.require("link_h2d_bytes_per_s"))
    assert link.tokens_per_s == pytest.approx(twice.outcome().tokens_per_s)
    names = " ".join(change.change for change in found.changes)
    for needed in ("host memory", "link", "GPU memory", "KV in 8 bits", "weights in 4 bits"):
        assert needed in names


def test_other_machines_are_sized_or_refused_with_a_reason():
    found = size(problem())
    assert {m.hardware for m in found.machines} == set(catalogue.hardware_names())
    for option in found.machines:
        assert (option.least_host_memory_bytes is None) == bool(option.why)


def test_requests_within_a_time_are_a_rate():
    day = Target(within_s=86_400.0)
    assert day.tokens_per_s(MTBENCH) == pytest.approx(20_000 * 162 / 86_400)
    assert Target(generated_tokens_per_s=64.0).tokens_per_s(MTBENCH) == pytest.approx(162)


@pytest.mark.parametrize("values", [{}, {"within_s": 1.0, "all_tokens_per_s": 1.0}])
def test_exactly_one_target_is_taken(values):
    with pytest.raises(InvalidInputError, match="give one of"):
        Target(**values)


def test_a_target_must_be_positive():
    with pytest.raises(InvalidInputError, match="above 0"):
        Target(all_tokens_per_s=0.0)


def test_a_given_kv_pool_contradicts_sizing():
    inputs = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "64", kv="70GB")
    with pytest.raises(InvalidInputError, match="--ram"):
        Problem.of(inputs, Target(all_tokens_per_s=1.0), "steady")


def test_an_unknown_figure_is_answered_with_the_nearest():
    inputs = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "64")
    with pytest.raises(InvalidInputError, match="did you mean stage2"):
        Problem.of(inputs, Target(all_tokens_per_s=1.0), "stage3")
