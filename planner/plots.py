"""Pictures of estimates and sweeps (matplotlib, the extra "plot", loaded when one is drawn)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InvalidInputError

_SUFFIXES = (".png", ".svg")
_SIZE_INCHES = (8.0, 5.0)
_DOTS_PER_INCH = 130
# Okabe-Ito, told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"
_CYCLE = (_BLUE, _ORANGE, _GREEN, _RED, "#CC79A7", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Mark:
    """A point of a curve that is pointed at: where a limit changes."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """Points to be joined, in the units of the axes. Curves of one `group` share a colour."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    group: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Cloud:
    """Points of one kind."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def check_path(path: Path) -> None:
    """InvalidInputError unless a picture can be written there."""
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidInputError("plot", f"{path.name} must end in {' or '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InvalidInputError("plot", f"the folder {path.parent} does not exist")


def over_time(
    path: Path,
    title: str,
    time_s: Sequence[float],
    tokens_per_s: Mapping[str, Sequence[float]],
    kv_share: Sequence[float],
    levels: Mapping[str, float],
    preempting_s: Sequence[tuple[float, float]] = (),
) -> None:
    """Throughput above, KV use below, over time. `levels` are horizontal lines with a name;
    `preempting_s` are the spans in which sequences were preempted."""
    plt = _pyplot()
    figure, (upper, lower) = plt.subplots(
        2, 1, sharex=True, figsize=_SIZE_INCHES, height_ratios=(2, 1)
    )
    unit, scale = _time_unit(time_s[-1])
    time = [t / scale for t in time_s]
    for (label, values), colour in zip(tokens_per_s.items(), _CYCLE, strict=False):
        upper.plot(time, values, color=colour, label=label)
    for (label, level), colour in zip(levels.items(), (_GREY, _RED), strict=False):
        upper.axhline(level, color=colour, linestyle="--", linewidth=1, label=label)
    upper.set_ylabel("throughput (tokens/s)")
    upper.set_ylim(bottom=0, top=_headroom(upper))
    upper.set_title(title, fontsize=11)
    upper.legend(fontsize=8, loc="upper center", ncols=2, framealpha=0.9)
    lower.plot(time, [share * 100 for share in kv_share], color=_GREEN, label="KV in use")
    for number, (start, end) in enumerate(preempting_s):
        label = "preempting" if number == 0 else "_nolegend_"
        lower.axvspan(start / scale, end / scale, color=_ORANGE, alpha=0.35, lw=0, label=label)
    lower.set_ylim(0, 105)
    lower.set_ylabel("KV pool (%)")
    lower.set_xlabel(f"time ({unit})")
    lower.legend(fontsize=8, loc="lower center", ncols=2)
    _save(figure, path)


def heat_map(
    path: Path,
    title: str,
    labels: tuple[str, str, str],
    x: Sequence[float],
    y: Sequence[float],
    values: Sequence[Sequence[float]],
    letters: Sequence[Sequence[str]],
) -> None:
    """`values[row][column]`, a percentage, for y[row] and x[column], written into its cell above a
    letter; `labels` are those of x, y and the values."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES)
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=100)
    axes.set_xticks(range(len(x)), [f"{v:g}" for v in x])
    axes.set_yticks(range(len(y)), [f"{v:g}" for v in y])
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            text = "-" if value != value else f"{value:.0f} {letters[row][column]}"
            colour = "black" if value > 60 else "white"
            axes.text(column, row, text, ha="center", va="center", color=colour, size=8)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, label=labels[2])
    _save(figure, path)


def roofline(
    path: Path,
    title: str,
    labels: tuple[str, str],
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    lines: Sequence[Mark],
) -> None:
    """Throughput over a capacity, both logarithmic. `marks` are turning points of the curves,
    `lines` are capacities (their y is not used) from which something else gives way."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES)
    for curve in curves:
        colour = _CYCLE[curve.group % len(_CYCLE)]
        style = "--" if curve.dashed else "-"
        axes.plot(curve.x, curve.y, style, color=colour, label=curve.label)
    for number, mark in enumerate(marks):
        name = "the GPU limits from here" if number == 0 else "_nolegend_"
        axes.plot([mark.x], [mark.y], "o", color="black", markersize=5, label=name)
        axes.annotate(
            mark.text,
            (mark.x, mark.y),
            textcoords="offset points",
            xytext=(0, 7),
            ha="center",
            fontsize=8,
        )
    for line in lines:
        axes.axvline(line.x, color=_GREY, linestyle=":", label=line.text)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=max(y for curve in curves for y in curve.y) * 1.7)
    ticks = _powers_of_two(curves)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=11)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    _save(figure, path)


def pareto(
    path: Path,
    title: str,
    labels: tuple[str, str],
    clouds: Sequence[Cloud],
    frontier: Sequence[Mark],
) -> None:
    """Clouds of points, and the steps that join those that no cheaper point beats."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=_SIZE_INCHES)
    for number, cloud in enumerate(clouds):
        colour = _CYCLE[number % len(_CYCLE)]
        axes.plot(cloud.x, cloud.y, "o", markersize=4, color=colour, label=cloud.label)
    axes.step(
        [p.x for p in frontier],
        [p.y for p in frontier],
        where="post",
        color="black",
        linewidth=1,
        label="nothing cheaper is faster",
    )
    for mark in frontier:
        axes.annotate(
            mark.text, (mark.x, mark.y), textcoords="offset points", xytext=(7, -11), fontsize=8
        )
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=11)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        problem = "pictures need matplotlib; install it with: pip install 'moe-lens[plot]'"
        raise InvalidInputError("plot", problem) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    check_path(path)
    figure.tight_layout()
    # No date inside, so that the same picture is the same file.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=metadata)
    _pyplot().close(figure)


def _time_unit(longest_s: float) -> tuple[str, float]:
    units = (("h", 3600.0), ("min", 60.0))
    return next((unit for unit in units if longest_s > 3 * unit[1]), ("s", 1.0))


def _headroom(axes: Any) -> float:
    """An upper limit that leaves the legend its place."""
    top: float = axes.get_ylim()[1]
    return top * 1.3


def _powers_of_two(curves: Sequence[Curve]) -> list[float]:
    values = [x for curve in curves for x in curve.x]
    tick, ticks = 1.0, []
    while tick <= max(values):
        if tick >= min(values):
            ticks.append(tick)
        tick *= 2
    return ticks
