"""One case over ranges of its inputs: a row for every combination."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import product
from typing import Any

from planner.errors import InvalidInputError
from planner.estimate import Detail, estimate
from planner.inputs import CaseInputs
from planner.report import Estimate

MAX_ROWS = 10_000

#: Columns after the swept inputs: the CSV's name and where the estimate's JSON has it.
OUTPUTS = (
    "stage1.tokens_per_s",
    "stage1.limit",
    "stage1.gpu_utilisation_share",
    "stage1.pme",
    "stage1.stream_s",
    "stage1.gpu_tokens_per_s",
    "stage2.tokens_per_s",
    "stage2.generated_tokens_per_s",
    "stage2.limit",
    "stage2.kv_prompts_per_step",
    "stage2.gpu_prompts_per_step",
    "stage2.total_s",
    "steady.tokens_per_s",
    "steady.limit",
    "simulation.tokens_per_s",
    "simulation.generated_tokens_per_s",
    "simulation.limit",
    "simulation.preemption_share",
    "simulation.total_s",
    "memory.kv_bytes",
    "memory.weights_bytes",
    "memory.kv_bytes_per_token",
    "memory.host.used_bytes",
    "host_needs.read_needed_bytes_per_s",
    "host_needs.read_available_bytes_per_s",
)


@dataclass(frozen=True)
class Axis:
    """An input and the values it takes, as texts."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepResult:
    """`rows` have the axes' values first, then OUTPUTS, then why a combination cannot run."""

    axes: tuple[Axis, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def column(self, name: str) -> list[Any]:
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def to_csv(self) -> str:
        """CSV with a header; what is not known is empty."""
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if v is None else v for v in row] for row in self.rows])
        return out.getvalue()


def parse_axis(text: str) -> Axis:
    """An axis from "name=value,value,…"; a value may be a range "first..last*factor" (geometric)
    or "first..last/count" (evenly spaced), the unit written at the last: "50..800GB*2"."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        problem = f"{text!r} is no axis; expected like prompt=64,128,256 or kv=50..800GB*2"
        raise InvalidInputError("over", problem)
    expanded = tuple(v for part in values.split(",") for v in _expand(part.strip(), text))
    return Axis(name.strip().replace("-", "_"), expanded)


def sweep(base: CaseInputs, axes: Sequence[Axis], detail: Detail = Detail.NONE) -> SweepResult:
    """Estimate every combination. A combination that cannot run gets a row that says why; an
    unknown input or too many rows raise InvalidInputError."""
    if not axes:
        raise InvalidInputError("over", "missing; give at least one axis such as kv=50..800GB*2")
    count = 1
    for axis in axes:
        base.with_input(axis.name, axis.values[0])
        count *= len(axis.values)
    if count > MAX_ROWS:
        raise InvalidInputError("over", f"{count} combinations; at most {MAX_ROWS} are computed")
    rows = tuple(_rows(base, axes, detail))
    return SweepResult(tuple(axes), (*(axis.name for axis in axes), *OUTPUTS, "error"), rows)


def _rows(base: CaseInputs, axes: Sequence[Axis], detail: Detail) -> Iterator[tuple[Any, ...]]:
    for values in product(*(axis.values for axis in axes)):
        inputs = base
        for axis, value in zip(axes, values, strict=True):
            inputs = inputs.with_input(axis.name, value)
        try:
            found = estimate(inputs.case(), detail)
        except InvalidInputError as error:
            yield (*values, *(None for _ in OUTPUTS), str(error))
            continue
        yield (*values, *_outputs(found), None)


def _outputs(found: Estimate) -> Iterator[Any]:
    data = found.to_json()
    for name in OUTPUTS:
        value: Any = data
        for key in name.split("."):
            value = None if value is None else value[key]
        yield value


def _expand(text: str, whole: str) -> Iterator[str]:
    if ".." not in text:
        yield text
        return
    first, _, rest = text.partition("..")
    sign = "*" if "*" in rest else "/"
    last, found, step = rest.rpartition(sign)
    number = last.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/ ")
    unit = last[len(number) :].strip()
    try:
        low, high, by = float(first), float(number), float(step)
    except ValueError as error:
        problem = f"{text!r} in {whole!r} is no range; expected like 64..1024*2 or 50..800GB/16"
        raise InvalidInputError("over", problem) from error
    if not found or not 0 < low <= high or (by <= 1 if sign == "*" else by < 2):
        problem = (
            f"{text!r} in {whole!r} must go upwards by a factor above 1, or in 2 steps or more"
        )
        raise InvalidInputError("over", problem)
    for value in _geometric(low, high, by) if sign == "*" else _even(low, high, round(by)):
        yield f"{value:.10g}{unit}"


def _geometric(low: float, high: float, factor: float) -> Iterator[float]:
    value = low
    while value <= high * (1 + 1e-9):
        yield value
        value *= factor


def _even(low: float, high: float, count: int) -> Iterator[float]:
    for i in range(count):
        yield low + (high - low) * i / (count - 1)
