"""Which picture shows what: estimates over time, sweeps as heat map, roofline or Pareto front."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import plots
from planner.errors import InvalidInputError, nearest
from planner.plots import Curve, Mark, check_path
from planner.report import Estimate
from planner.simulate import StepRecord
from planner.sweep import Axis, SweepResult
from planner.units import parse_bytes

__all__ = ["check_path", "estimate_picture", "sweep_picture"]

PICTURES = ("heatmap", "roofline", "pareto")
#: Points of a curve over time: more would not be seen.
_POINTS = 400


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
    width = len(across.values)
    plots.heat_map(
        path,
        title,
        f"{_label(across.name)}",
        f"{_label(down.name)}",
        [_number(v) for v in across.values],
        [_number(v) for v in down.values],
        [shares[row * width : (row + 1) * width] for row in range(len(down.values))],
        "GPU utilisation, Stage 2 over T_GPU (%)",
    )


def _label(name: str) -> str:
    labels = {"prompt": "prompt tokens", "generate": "generated tokens", "requests": "requests"}
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
    for name, rows in groups.items():
        suffix = f", {name}" if name else ""
        kv = [row["memory.kv_bytes"] / 1e9 for row in rows]
        curves.append(Curve(f"Stage 2{suffix}", kv, [r["stage2.tokens_per_s"] for r in rows]))
        bound = [r["stage1.tokens_per_s"] for r in rows]
        curves.append(Curve(f"Stage 1{suffix}", kv, bound, dashed=True))
        marks.extend(_turning_points(rows, max(kv)))
    plots.roofline(path, title, "KV pool (GB)", "tokens/s", curves, marks)


def _turning_points(rows: Sequence[dict[str, Any]], most_gb: float) -> list[Mark]:
    """Where Stage 1's limit turns from KV capacity to the GPU, and the host's memory becomes too
    slow, when that lies in the range."""
    row = rows[0]
    marks = []
    gpu = row["stage1.gpu_tokens_per_s"]
    if gpu:
        tokens = gpu * row["stage1.stream_s"] / row["stage1.pme"]
        kv_gb = tokens * row["memory.kv_bytes_per_token"] / 1e9
        if kv_gb <= most_gb:
            marks.append(Mark(kv_gb, gpu, f"GPU limits from {kv_gb:.0f} GB"))
    available = row["host_needs.read_available_bytes_per_s"]
    needed = row["host_needs.read_needed_bytes_per_s"]
    if available and needed:
        stream_s = row["stage1.stream_s"]
        link = needed - row["memory.kv_bytes"] / stream_s
        kv_gb = (available - link) * stream_s / 1e9
        if 0 < kv_gb <= most_gb:
            at = min(row["stage1.tokens_per_s"] * kv_gb * 1e9 / row["memory.kv_bytes"], gpu or 1e99)
            marks.append(Mark(kv_gb, at, f"host reads too slow from {kv_gb:.0f} GB"))
    return marks


def _pareto(path: Path, result: SweepResult, title: str) -> None:
    """Host memory used against throughput; the cheapest case for each throughput is named."""
    points = []
    for row in result.rows:
        data = dict(zip(result.columns, row, strict=True))
        if data["error"] is None:
            text = ", ".join(f"{a.name} {data[a.name]}" for a in result.axes)
            rate = data["simulation.tokens_per_s"] or data["stage2.tokens_per_s"]
            points.append(Mark(data["memory.host.used_bytes"] / 1e9, rate, text))
    points.sort(key=lambda p: (p.x, -p.y))
    frontier: list[Mark] = []
    for point in points:
        if not frontier or point.y > frontier[-1].y:
            frontier.append(point)
    plots.pareto(path, title, "host memory used (GB)", "tokens/s", points, frontier)
