"""The baselines: what their models must obey, and how far they are from published figures."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.baselines import (
    BaselineEstimate,
    Case,
    Policy,
    Rates,
    Shape,
    decode_layer_parts_s,
    flexgen,
    moe_lightning,
)
from planner.errors import InvalidInputError
from planner.hardware import Quantity
from planner.published import mean_error, published_rows
from planner.workload import Workload

MIXTRAL = catalogue.model("mixtral-8x7b")
L4 = catalogue.hardware("l4-gcp-g2")
MTBENCH = Workload("mtbench", 77, 64, 100_000, max_prompt_tokens=418)


def estimate(hardware=L4, workload=MTBENCH, **options) -> BaselineEstimate:
    found = moe_lightning(MIXTRAL, hardware, workload, **options)
    assert found is not None
    return found


def with_value(hardware, **values):
    return hardware.with_values("assumed", "test", **values)


def test_l4_is_predicted_within_the_spread_of_its_measurements():
    errors = [r.expected_error for r in published_rows() if r.hardware == "l4-gcp-g2"]
    assert len(errors) == 12
    assert mean_error(errors) < 0.25


def test_the_claimed_model_is_as_far_off_as_its_authors_report():
    """Their own predictor says 945 where 203 are measured on the L4, g = 32."""
    (row,) = [
        r
        for r in published_rows()
        if (r.hardware, r.system, r.generated_tokens) == ("l4-gcp-g2", "moe-lightning", 32)
    ]
    assert 2 < row.claimed_tokens_per_s / row.measured_tokens_per_s < 6


def test_every_policy_fits_into_the_memory_it_was_given():
    for workload in (MTBENCH, Workload("long", 926, 128, 20_000, max_prompt_tokens=1843)):
        found = estimate(workload=workload, claimed=True).policy
        kv_bytes = found.batch_sequences * MIXTRAL.kv_bytes_per_token
        kv_bytes *= workload.prompt_tokens + workload.generated_tokens
        assert kv_bytes + MIXTRAL.weights_bytes <= L4.require("host_memory_bytes") * 1.001
        resident = found.gpu_weight_share * MIXTRAL.streamed_bytes_per_pass
        assert resident < L4.require("gpu_memory_bytes")


def test_padding_never_helps():
    assert estimate(padded=True).generated_tokens_per_s <= estimate().generated_tokens_per_s


def test_peak_rates_promise_more_than_is_reached():
    assert estimate(claimed=True).generated_tokens_per_s > estimate().generated_tokens_per_s


def test_flexgen_is_slower_than_moe_lightning():
    slow = flexgen(MIXTRAL, L4, MTBENCH)
    assert slow is not None
    assert slow.generated_tokens_per_s < estimate().generated_tokens_per_s


@pytest.mark.parametrize(
    "field",
    [
        "link_h2d_bytes_per_s",
        "host_memory_bytes",
        "gpu_memory_bytes",
        "gpu_flops_per_s",
        "host_read_bytes_per_s",
    ],
)
@settings(max_examples=15, deadline=None)
@given(factor=st.floats(1.1, 4))
def test_more_of_any_resource_never_slows_a_batch_down(field, factor):
    # 3 %: batch sizes are tried on a geometric grid.
    more = with_value(L4, **{field: L4.require(field) * factor})
    assert estimate(more).generated_tokens_per_s >= 0.97 * estimate().generated_tokens_per_s


def test_a_model_larger_than_host_memory_has_no_policy():
    small = with_value(L4, host_memory_bytes=64e9)
    assert moe_lightning(MIXTRAL, small, MTBENCH) is None
    assert flexgen(MIXTRAL, small, MTBENCH) is None


def test_unknown_rates_are_named():
    unknown = replace(L4, link_h2d_bytes_per_s=None)
    with pytest.raises(InvalidInputError, match="link_h2d_bytes_per_s"):
        moe_lightning(MIXTRAL, unknown, MTBENCH)


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 4000), factor=st.integers(2, 5), attention=st.booleans())
def test_decode_terms_scale_with_what_they_count(n, factor, attention):
    case = Case(MIXTRAL, Rates.claimed(L4), Shape.of(MTBENCH, False), False, False)
    one = decode_layer_parts_s(case, Policy(n, n, attention, True, 0.0, 0.0))
    many = decode_layer_parts_s(case, Policy(n * factor, n * factor, attention, True, 0.0, 0.0))
    weights_s = case.layer_bytes / case.rates.link_bytes_per_s
    assert many["link"] - weights_s == pytest.approx(factor * (one["link"] - weights_s), rel=1e-6)
    assert many["link back"] == pytest.approx(factor * one["link back"])
    assert many["cpu"] == pytest.approx(factor * one["cpu"])
    resident = decode_layer_parts_s(case, Policy(n, n, attention, True, 1.0, 1.0))
    assert resident["link"] <= one["link"] - weights_s * 0.999


def test_four_gpus_stream_over_four_links():
    one = catalogue.hardware("t4+gcp-n1-416")
    four = replace(one, gpu_count=4)
    assert four.combined().require("link_h2d_bytes_per_s") == 4 * one.require(
        "link_h2d_bytes_per_s"
    )
    assert isinstance(four.combined().gpu_memory_bytes, Quantity)
    assert (
        estimate(four, claimed=True).generated_tokens_per_s
        > 2 * estimate(one, claimed=True).generated_tokens_per_s
    )
