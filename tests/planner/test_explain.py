"""Explanations: the numbers put in give the figure that is explained."""

import math

import pytest

from planner.errors import InvalidInputError
from planner.estimate import Detail, estimate
from planner.explain import explain
from planner.inputs import CaseInputs

CASES = [
    CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "32", "25000", kv="70GB"),
    CaseInputs("deepseek-v3", "h200-server", "512", "128", "5000", kv="100GB", kv_format="int8"),
    CaseInputs("gpt-oss-120b", "4xt4-gcp-n1", "98", "64", "5000", kv="64GiB", block="32"),
    CaseInputs("mixtral-8x7b", "rtx4090", workload="mtbench-64", resident="auto", kv_format="int8"),
]


def value_of(figure, data):
    for key in figure.split("."):
        data = data[key]
    return data


@pytest.mark.parametrize("inputs", CASES, ids=lambda inputs: inputs.model)
def test_every_formula_evaluates_to_its_figure_and_the_estimates(inputs):
    case = inputs.case()
    found = estimate(case, Detail.SCALED)
    rows = explain(case, found)
    assert len({row.figure for row in rows}) == len(rows) > 15
    for row in rows:
        # The numbers are arithmetic of our own making, so that evaluating them is safe.
        computed = eval(row.numbers, {"__builtins__": {}}, {"min": min, "sum": sum})
        assert math.isclose(computed, row.value, rel_tol=1e-5), row
        assert value_of(row.figure, found.to_json()) == row.value


def test_one_figure_can_be_asked_for():
    case = CASES[0].case()
    found = estimate(case, Detail.NONE)
    (row,) = explain(case, found, "stage1.pme")
    assert row.value == pytest.approx(0.0356, abs=5e-5)
    with pytest.raises(InvalidInputError, match=r"did you mean stage1\.pme"):
        explain(case, found, "stage1.pm")


def test_without_a_simulation_there_is_nothing_to_explain_of_it():
    case = CASES[0].case()
    rows = explain(case, estimate(case, Detail.NONE))
    assert not any(row.figure.startswith("simulation") for row in rows)
