"""Which picture shows what: estimates over time, sweeps as heat map, roofline or Pareto front."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import plots
from planner.errors import InvalidInputError, nearest
from planner.plots import Cloud, Curve, Mark, check_path
from planner.report import Estimate
from planner.simulate import StepRecord
from planner.sweep import Axis, SweepResult
from planner.units import parse_bytes

__all__ = ["check_path", "estimate_picture", "sweep_picture"]

PICTURES = ("heatmap", "roofline", "pareto")
#: Points of a curve over time: more would not be seen.
_POINTS = 400
#: A step of the Pareto front is at least so much faster.
_WORTH_A_STEP = 1.01


def estimate_picture(path: Path, found: Estimate, steps: Sequence[StepRecord]) -> None:
    """Throughput and KV use over time, with both stages as levels."""
    if not steps or found.simulation is None:
        raise InvalidInputError("plot", "shows the simulation, which --no-simulate leaves out")
    times, total, decoded, kv = _binned(steps)
    levels = {"Stage 1 bound": found.stage1.tokens_per_s}
    if found.stage2 is not None:
        levels["Stage 2"] = found.stage2.tokens_per_s
    work = found.workload
    scale = found.simulation.scale
    blocks = found.memory.kv_capacity_tokens / found.memory.block_tokens / scale
    title = (
        f"{found.model.name} on {found.hardware.name}: {work.requests:,} requests of"
        f" {work.prompt_tokens:g} + {work.generated_tokens:g} tokens,"
        f" KV {found.memory.kv_bytes / 1e9:.0f} GB"
    )
    plots.over_time(
        path,
        title,
        times,
        {"all tokens": total, "generated tokens": decoded},
        [used / blocks for used in kv],
        levels,
        _spans(steps),
    )


def _binned(
    steps: Sequence[StepRecord],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Rates over groups of steps: (end times, tokens/s, decoded tokens/s, mean KV blocks)."""
    size = max(1, len(steps) // _POINTS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    rows = []
    for group in groups:
        span = sum(step.duration_s for step in group)
        rows.append(
            (
                group[-1].start_s + group[-1].duration_s,
                sum(step.load.tokens for step in group) / span,
                sum(step.load.decode_sequences for step in group) / span,
                sum(step.kv_blocks * step.duration_s for step in group) / span,
            )
        )
    times, total, decoded, kv = (list(column) for column in zip(*rows, strict=True))
    return times, total, decoded, kv


def _spans(steps: Sequence[StepRecord]) -> list[tuple[float, float]]:
    """Times in which a sequence was evicted or computed again, adjoining ones joined."""
    spans: list[tuple[float, float]] = []
    for step in steps:
        if not step.under_preemption:
            continue
        start, end = step.start_s, step.start_s + step.duration_s
        if spans and start <= spans[-1][1] * (1 + 1e-9):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def sweep_picture(path: Path, result: SweepResult, kind: str | None, title: str) -> None:
    """Draw a sweep. Without a kind: a heat map for prompt and generate, a roofline where KV or RAM
    is swept first, a Pareto front otherwise."""
    chosen = kind or _kind_of(result.axes)
    if chosen not in PICTURES:
        raise InvalidInputError("picture", f"unknown {chosen!r}; {nearest(chosen, PICTURES)}")
    if all(row[-1] is not None for row in result.rows):
        raise InvalidInputError("plot", f"no combination can run: {result.rows[0][-1]}")
    draw = {"heatmap": _heat_map, "roofline": _roofline, "pareto": _pareto}[chosen]
    draw(path, result, title)


def _kind_of(axes: Sequence[Axis]) -> str:
    names = [axis.name for axis in axes]
    if sorted(names) == ["generate", "prompt"]:
        return "heatmap"
    return "roofline" if names[0] in ("kv", "ram") and len(names) <= 2 else "pareto"


def _heat_map(path: Path, result: SweepResult, title: str) -> None:
    if len(result.axes) != 2:
        raise InvalidInputError("picture", "a heat map needs two axes")
    down, across = result.axes
    values = result.column("stage2.tokens_per_s")
    bounds = result.column("stage1.gpu_tokens_per_s")
    shares = [
        100 * value / bound if value is not None and bound else float("nan")
        for value, bound in zip(values, bounds, strict=True)
    ]
    letters = ["" if limit is None else limit[0].upper() for limit in result.column("stage2.limit")]
    width = len(across.values)
    plots.heat_map(
        path,
        f"{title}; G: the GPU limits, K: KV capacity limits",
        (_label(across.name), _label(down.name), "GPU utilisation, Stage 2 over T_GPU (%)"),
        [_number(v) for v in across.values],
        [_number(v) for v in down.values],
        _by_rows(shares, width),
        _by_rows(letters, width),
    )


def _by_rows(cells: list[Any], width: int) -> list[list[Any]]:
    return [cells[i : i + width] for i in range(0, len(cells), width)]


def _label(name: str) -> str:
    labels = {"prompt": "prompt tokens", "generate": "generated tokens", "kv_format": "KV"}
    return labels.get(name, name)


def _number(text: str) -> float:
    return parse_bytes(text) if not text.replace(".", "").isdigit() else float(text)


def _roofline(path: Path, result: SweepResult, title: str) -> None:
    """Stage 1 and Stage 2 over the KV pool, a colour for each value of the second axis."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result.rows:
        data = dict(zip(result.columns, row, strict=True))
        if data["error"] is None:
            name = ", ".join(f"{_label(a.name)} {data[a.name]}" for a in result.axes[1:])
            groups.setdefault(name, []).append(data)
    curves, marks = [], []
    for number, (name, rows) in enumerate(groups.items()):
        suffix = f", {name}" if name else ""
        kv = [row["memory.kv_bytes"] / 1e9 for row in rows]
        batch, bound = ([r[f"stage{n}.tokens_per_s"] for r in rows] for n in (2, 1))
        curves.append(Curve(f"Stage 2{suffix}", kv, batch, number))
        curves.append(Curve(f"Stage 1{suffix}", kv, bound, number, dashed=True))
        marks.extend(_turning_point(rows[0], max(kv)))
    lines = _host_limit(next(iter(groups.values()))[0])
    plots.roofline(path, title, ("KV pool (GB)", "tokens/s"), curves, marks, lines)


def _turning_point(row: dict[str, Any], most_gb: float) -> list[Mark]:
    """Where Stage 1's limit turns from KV capacity to the GPU, when that lies in the range."""
    gpu = row["stage1.gpu_tokens_per_s"]
    if not gpu:
        return []
    tokens = gpu * row["stage1.stream_s"] / row["stage1.pme"]
    kv_gb = tokens * row["memory.kv_bytes_per_token"] / 1e9
    return [Mark(kv_gb, gpu, f"{kv_gb:.0f} GB")] if kv_gb <= most_gb else []


def _host_limit(row: dict[str, Any]) -> list[Mark]:
    """The KV pool from which reading it once a pass, beside the weights, is too much for the
    host's memory (Eq 5)."""
    available = row["host_needs.read_available_bytes_per_s"]
    needed = row["host_needs.read_needed_bytes_per_s"]
    if not available or not needed:
        return []
    stream_s = row["stage1.stream_s"]
    link = needed - row["memory.kv_bytes"] / stream_s
    kv_gb = (available - link) * stream_s / 1e9
    return [Mark(kv_gb, 0.0, f"host memory too slow beyond {kv_gb:.0f} GB")] if kv_gb > 0 else []


#: Axes that the horizontal axis shows already.
_COST_AXES = ("ram", "kv")


def _pareto(path: Path, result: SweepResult, title: str) -> None:
    """Host memory used against throughput: a cloud for each combination of the other axes, and
    the amounts of memory from which no smaller one is as fast."""
    clouds: dict[str, list[tuple[float, float]]] = {}
    for row in result.rows:
        data = dict(zip(result.columns, row, strict=True))
        if data["error"] is None:
            others = [a.name for a in result.axes if a.name not in _COST_AXES]
            name = ", ".join(f"{_label(other)} {data[other]}" for other in others) or "cases"
            rate = data["simulation.tokens_per_s"] or data["steady.tokens_per_s"]
            clouds.setdefault(name, []).append((data["memory.host.used_bytes"] / 1e9, rate))
    frontier: list[Mark] = []
    for cost, rate in sorted((p for c in clouds.values() for p in c), key=lambda p: (p[0], -p[1])):
        if not frontier or rate > frontier[-1].y * _WORTH_A_STEP:
            frontier.append(Mark(cost, rate, f"{cost:.0f} GB"))
    shown = [
        Cloud(name, [x for x, _ in points], [y for _, y in points])
        for name, points in clouds.items()
    ]
    plots.pareto(path, title, ("host memory used (GB)", "tokens/s"), shown, frontier)
