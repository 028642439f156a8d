"""From observed steps to a machine: least-squares fits of the iteration's cost terms."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from planner.costs import IterationCosts, StepLoad
from planner.errors import InvalidInputError
from planner.hardware import HardwareSpec, Quantity

#: Fewer steps than this are noise, not a measurement.
MIN_STEPS = 4


@dataclass(frozen=True)
class ObservedStep:
    """One executed step, summed over its layers: what was in it and how long each part took.

    A duration of zero means that the part did not happen or was not measured.
    """

    tokens: int
    sequences: int
    kv_read_bytes: float
    weights_streamed_bytes: float
    link_s: float
    device_s: float
    attention_s: float

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise InvalidInputError(f"steps.{field}", f"must be at least 0, is {value!r}")


@dataclass(frozen=True)
class Fit:
    """One fitted term. `mean_error_share` is the mean distance of the fitted time from the
    observed one, as a share of the latter's mean."""

    term: str
    values: dict[str, float]
    steps: int
    mean_error_share: float


def calibrate(
    hardware: HardwareSpec, n_layers: int, steps: Sequence[ObservedStep], model_name: str
) -> tuple[HardwareSpec, list[Fit]]:
    """`hardware` with every value replaced that the steps determine, and the fits behind them.

    Three lines are fitted, each where there are enough steps that differ: device time of a layer
    over tokens (a0 + a1 x), attention time over KV bytes and sequences, transfer time over bytes
    and attention time (the link's rate and its slowdown kappa). Coefficients are never negative.
    Raises InvalidInputError where no line can be fitted.
    """
    if n_layers < 1:
        raise InvalidInputError("n_layers", f"must be at least 1, is {n_layers}")
    found = [
        fit
        for fit in (_device(steps, n_layers), _attention(steps, n_layers), _link(steps))
        if fit is not None
    ]
    if not found:
        problem = f"at least {MIN_STEPS} steps of different sizes are needed, got {len(steps)}"
        raise InvalidInputError("steps", problem)
    fitted = hardware
    for fit in found:
        source = f"fitted to {fit.steps} steps, mean error {fit.mean_error_share:.1%}"
        quantities = {k: Quantity(v, "measured", source) for k, v in fit.values.items()}
        fitted = replace(fitted, **quantities)  # type: ignore[arg-type]
        if fit.term == "device":
            fitted = replace(fitted, device_time_curve=None)  # the line is newer
    return replace(fitted, profiled_model=model_name), found


def calibrate_overheads(
    costs: IterationCosts, steps: Sequence[tuple[StepLoad, float]]
) -> dict[str, float]:
    """step_overhead_s and step_overhead_sequence_s from loads and wall seconds: what a step took
    beyond its predicted time without them, as a line in its sequences.

    Only steps that the link does not limit count (there it would be hidden); of several with as
    many sequences, the median. Empty where there are no two such numbers of sequences.
    """
    bare = replace(costs, overhead_fixed_s=0.0, overhead_sequence_s=0.0)
    beyond: dict[float, list[float]] = {}
    for load, wall_s in steps:
        time = bare.iteration(load)
        if time.limit in ("device", "attention", "head", "overhead"):
            beyond.setdefault(load.sequences, []).append(max(0.0, wall_s - time.total_s))
    if len(beyond) < 2:
        return {}
    rows = [(1.0, sequences) for sequences in beyond]
    found = _least_squares(rows, [median(values) for values in beyond.values()])
    if found is None:
        return {}
    return {"step_overhead_s": found[0], "step_overhead_sequence_s": found[1]}


def _device(steps: Sequence[ObservedStep], n_layers: int) -> Fit | None:
    used = [step for step in steps if step.device_s > 0 and step.tokens > 0]
    return _fit(
        "device",
        rows=[(1.0, float(step.tokens)) for step in used],
        observed=[step.device_s / n_layers for step in used],
        name=lambda c: {"device_time_fixed_s": c[0], "device_time_per_token_s": c[1]},
    )


def _attention(steps: Sequence[ObservedStep], n_layers: int) -> Fit | None:
    used = [step for step in steps if step.attention_s > 0 and step.kv_read_bytes > 0]

    def name(c: Sequence[float]) -> dict[str, float]:
        rate = {"attention_bytes_per_s": 1 / c[0]} if c[0] > 0 else {}
        return rate | {"attention_sequence_s": c[1]}

    return _fit(
        "attention",
        rows=[(step.kv_read_bytes, float(step.sequences * n_layers)) for step in used],
        observed=[step.attention_s for step in used],
        name=name,
    )


def _link(steps: Sequence[ObservedStep]) -> Fit | None:
    used = [step for step in steps if step.link_s > 0 and step.weights_streamed_bytes > 0]
    return _fit(
        "link",
        rows=[(step.weights_streamed_bytes, step.attention_s) for step in used],
        observed=[step.link_s for step in used],
        name=lambda c: {"link_h2d_bytes_per_s": 1 / c[0], "link_slowdown": c[1]} if c[0] else {},
    )


def _fit(
    term: str,
    rows: Sequence[tuple[float, float]],
    observed: Sequence[float],
    name: Callable[[Sequence[float]], dict[str, float]],
) -> Fit | None:
    if len(rows) < MIN_STEPS:
        return None
    coefficients = _least_squares(rows, observed)
    if coefficients is None:
        return None
    values = name(coefficients)
    if not values:
        return None
    error = sum(
        abs(coefficients[0] * a + coefficients[1] * b - y)
        for (a, b), y in zip(rows, observed, strict=True)
    )
    return Fit(term, values, len(rows), error / sum(observed))


def _least_squares(
    rows: Sequence[tuple[float, float]], observed: Sequence[float]
) -> tuple[float, float] | None:
    """The two coefficients, none negative, that minimise the squared error; a column that is
    constant at zero or that does not differ from the other gets the coefficient zero."""
    scale = tuple(max(abs(row[i]) for row in rows) or 1.0 for i in (0, 1))
    scaled = [(a / scale[0], b / scale[1]) for a, b in rows]
    aa = math.fsum(a * a for a, _ in scaled)
    ab = math.fsum(a * b for a, b in scaled)
    bb = math.fsum(b * b for _, b in scaled)
    ay = math.fsum(a * y for (a, _), y in zip(scaled, observed, strict=True))
    by = math.fsum(b * y for (_, b), y in zip(scaled, observed, strict=True))
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        both = ((ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant)
        if min(both) >= 0:
            return both[0] / scale[0], both[1] / scale[1]
    alone = [(ay / aa if aa else 0.0, 0.0), (0.0, by / bb if bb else 0.0)]
    if determinant <= 1e-9 * aa * bb and aa and bb:
        return None if _indistinct(rows) else (alone[0][0] / scale[0], 0.0)

    def error(c: tuple[float, float]) -> float:
        return math.fsum(
            (c[0] * a + c[1] * b - y) ** 2 for (a, b), y in zip(scaled, observed, strict=True)
        )

    best = min(alone, key=error)
    return best[0] / scale[0], best[1] / scale[1]


def _indistinct(rows: Sequence[tuple[float, float]]) -> bool:
    """Whether every row is the same point, so that no line goes through it alone."""
    return len(set(rows)) == 1
