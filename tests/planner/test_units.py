"""Sizes and rates, read and printed, with GB and GiB kept apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import units
from planner.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("70GB", 70 * 10**9),
        ("70 GB", 70 * 10**9),
        ("70gb", 70 * 10**9),
        ("64GiB", 64 * 2**30),
        ("64gib", 64 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("2.5e9", 2_500_000_000),
        ("4096", 4096),
        ("1_000 kB", 10**6),
        (".5MB", 500_000),
        ("0", 0),
    ],
)
def test_sizes_accept_decimal_and_binary_units(text, expected_bytes):
    assert units.parse_bytes(text) == expected_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "70 G", "70Gb/s", "7 0GB", "nan", "inf", "-1GB", "1e999"]
)
def test_what_is_no_size_names_field_and_text(text):
    with pytest.raises(InvalidInputError, match="kv: ") as error:
        units.parse_bytes(text, "kv")
    assert error.value.field == "kv"
    assert repr(text) in error.value.problem


def test_unknown_unit_suggests_the_nearest():
    with pytest.raises(InvalidInputError, match=r"did you mean .*gib"):
        units.parse_bytes("70 gibs")


def test_rates_counts_and_durations():
    assert units.parse_bytes_per_s("19.5GB/s") == 19.5e9
    assert units.parse_flops_per_s("150 TFLOP/s") == 150e12
    assert units.parse_count("25k") == 25_000
    assert units.parse_seconds("1.5h") == 5400
    with pytest.raises(InvalidInputError, match="whole number"):
        units.parse_count("1.5")


@pytest.mark.parametrize(
    ("size_bytes", "decimal", "binary"),
    [
        (70e9, "70.0 GB", "65.2 GiB"),
        (2**30, "1.07 GB", "1.00 GiB"),
        (999, "999 B", "999 B"),
        (999_999, "1.00 MB", "977 KiB"),
        (0, "0 B", "0 B"),
    ],
)
def test_sizes_print_three_digits_and_their_unit(size_bytes, decimal, binary):
    assert units.format_bytes(size_bytes) == decimal
    assert units.format_bytes(size_bytes, binary=True) == binary
    assert units.format_bytes_both(size_bytes) == f"{decimal} ({binary})"


@settings(max_examples=300, deadline=None)
@given(size_bytes=st.integers(0, 10**15), binary=st.booleans())
def test_printed_sizes_read_back_within_their_digits(size_bytes, binary):
    text = units.format_bytes(size_bytes, binary=binary)
    assert abs(units.parse_bytes(text) - size_bytes) <= 0.006 * size_bytes


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (4.82, "4.82 s"),
        (0.012, "12.0 ms"),
        (3e-6, "3.00 µs"),
        (5e-9, "5.00 ns"),
        (0, "0 ns"),
        (125, "2 min 05 s"),
        (27_120, "7 h 32 min"),
        (3599.7, "60 min 00 s"),
        (float("inf"), "inf s"),
    ],
)
def test_durations_print_in_the_unit_a_person_would_use(duration_s, text):
    assert units.format_seconds(duration_s) == text


@settings(max_examples=300, deadline=None)
@given(numerator=st.integers(0, 10**12), denominator=st.integers(1, 10**6))
def test_div_ceil_is_the_least_integer_that_covers(numerator, denominator):
    quotient = units.div_ceil(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator
