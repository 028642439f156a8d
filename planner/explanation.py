"""One explained figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """One figure: its name in the estimate's JSON, formula in symbols, the same in numbers."""

    figure: str
    meaning: str
    formula: str
    numbers: str
    value: float
    unit: str
    source: str


def number(value: float) -> str:
    """Enough digits to check the result by hand."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.8g}"
