"""Sizes and rates as people write them, turned into SI base units and back.

GB is 10^9 bytes and GiB is 2^30 bytes; the two are never mixed, and what is printed names its unit.
"""

import math
import re
from collections.abc import Mapping
from typing import Final

from planner.errors import InvalidInputError, nearest

_DECIMAL: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_BYTE_UNITS: Final = {
    **{prefix + "B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()},
    "KB": 10**3,
}
_COUNT_UNITS: Final = {**_DECIMAL, "K": 10**3}
_FLOPS_UNITS: Final = {prefix + "FLOP/s": factor for prefix, factor in _DECIMAL.items()}
_RATE_UNITS: Final = {unit + "/s": factor for unit, factor in _BYTE_UNITS.items()}
_SECOND_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER: Final = re.compile(r"\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


def div_ceil(numerator: int, denominator: int) -> int:
    """The least integer that is at least numerator / denominator (both ≥ 0, denominator > 0)."""
    return -(-numerator // denominator)


def parse_bytes(text: str, field: str = "size") -> int:
    """Bytes from text such as "70GB", "64 GiB", "4096" (a bare number is bytes).

    This and the functions below raise InvalidInputError, naming `field` and the units that would
    be right, for what is no number, an unknown unit, or a negative value.
    """
    return round(_parse(text, field, _BYTE_UNITS, default="B"))


def parse_bytes_per_s(text: str, field: str = "rate") -> float:
    """Bytes per second from text such as "19.5GB/s" (a bare number is bytes per second)."""
    return _parse(text, field, _RATE_UNITS, default="B/s")


def parse_flops_per_s(text: str, field: str = "rate") -> float:
    """FLOP per second from text such as "150 TFLOP/s" (a bare number is FLOP per second)."""
    return _parse(text, field, _FLOPS_UNITS, default="FLOP/s")


def parse_count(text: str, field: str = "count") -> int:
    """A count from text such as "25000", "25k" or "1M"; it must come out as an integer."""
    value = _parse(text, field, _COUNT_UNITS, default="")
    if value != int(value):
        raise InvalidInputError(field, f"must be a whole number, is {text!r}")
    return int(value)


def parse_seconds(text: str, field: str = "duration") -> float:
    """Seconds from text such as "20ms", "1.5 h" (a bare number is seconds)."""
    return _parse(text, field, _SECOND_UNITS, default="s")


def format_bytes(size_bytes: float, *, binary: bool = False) -> str:
    """Three significant digits and the unit: "94.0 GB", or "87.5 GiB" when binary."""
    return _format(size_bytes, _BINARY if binary else _DECIMAL, "B")


def format_bytes_both(size_bytes: float) -> str:
    """Both conventions beside each other: "70.0 GB (65.2 GiB)"."""
    return f"{format_bytes(size_bytes)} ({format_bytes(size_bytes, binary=True)})"


def format_bytes_per_s(rate_bytes_per_s: float) -> str:
    """Three significant digits, decimal prefix: "19.5 GB/s"."""
    return _format(rate_bytes_per_s, _DECIMAL, "B/s")


def format_flops_per_s(rate_flops_per_s: float) -> str:
    """Three significant digits, decimal prefix: "150 TFLOP/s"."""
    return _format(rate_flops_per_s, _DECIMAL, "FLOP/s")


def format_seconds(duration_s: float) -> str:
    """A duration in the unit that a person would use: "4.82 s", "12.0 ms", "7 h 32 min"."""
    if duration_s != duration_s or duration_s in (float("inf"), float("-inf")):
        return f"{duration_s} s"
    if duration_s >= 3600:
        minutes = round(duration_s / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if duration_s >= 120:
        return f"{round(duration_s) // 60} min {round(duration_s) % 60:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if duration_s >= scale:
            return f"{_three_digits(duration_s / scale)} {unit}"
    return f"{_three_digits(duration_s / 1e-9)} ns"


def _parse(text: str, field: str, units: Mapping[str, float], *, default: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InvalidInputError(field, f"{text!r} is no number with one of {_listed(units)}")
    number, unit = match.groups()
    value = float(number.replace("_", "")) * units[_find_unit(unit or default, units, text, field)]
    if not 0 <= value < math.inf:
        raise InvalidInputError(field, f"must be a number of at least 0, is {text!r}")
    return value


def _find_unit(unit: str, units: Mapping[str, float], text: str, field: str) -> str:
    """The spelling in the table; a difference of case alone is accepted when it is unambiguous."""
    if unit in units:
        return unit
    same = [known for known in units if known.lower() == unit.lower()]
    if same and len({units[known] for known in same}) == 1:
        return same[0]
    spellings = {known.lower(): known for known in units if known}
    hint = nearest(unit, spellings, limit=2)
    raise InvalidInputError(
        field, f"unknown unit {unit!r} in {text!r}; one of {_listed(units)}; {hint}"
    )


def _listed(units: Mapping[str, float]) -> str:
    return ", ".join(unit for unit in units if unit)


def _format(value: float, prefixes: Mapping[str, int], unit: str) -> str:
    base = 1024 if "Ki" in prefixes else 1000
    chosen, factor = "", 1
    for prefix, size in prefixes.items():
        if size > 1 and abs(value) >= size * (1 - 0.5 / base):
            chosen, factor = prefix, size
    return f"{_three_digits(value / factor)} {chosen}{unit}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95 or (value == int(value) and magnitude < 1):
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
