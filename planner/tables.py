"""An estimate and its relatives as tables for people (rich, loaded when one is printed)."""

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from planner.memory import MemoryBudget
from planner.report import (
    Estimate,
    HostNeedsReport,
    SimulationReport,
    Stage1Report,
    Stage2Report,
    SteadyReport,
)
from planner.units import (
    format_bytes_both,
    format_bytes_per_s,
    format_flops_per_s,
    format_seconds,
)
from planner.words import limit_text

NOT_KNOWN = "not known"


def new_table(title: str, columns: Sequence[str], right: Iterable[int] = ()) -> Table:
    """A plain table; columns numbered in `right` are set flush right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    flush = set(right)
    for index, name in enumerate(columns):
        justify: Literal["right", "left"] = "right" if index in flush else "left"
        table.add_column(name, justify=justify, no_wrap=index in flush or index == 0)
    return table


def console() -> Console:
    return Console(highlight=False, soft_wrap=False)


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second to the digits that mean something."""
    if tokens_per_s is None:
        return NOT_KNOWN
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def share(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.1%}"


def print_estimate(estimate: Estimate) -> None:
    """The case, its memory, and what each stage of the model says."""
    out = console()
    out.print(_headline(estimate))
    out.print()
    out.print(_throughput(estimate))
    out.print()
    out.print(_memory_table("Host memory", estimate.memory.host))
    out.print()
    out.print(_memory_table("GPU memory", estimate.memory.gpu))
    out.print()
    if estimate.host_needs is not None:
        out.print(_needs(estimate.host_needs))
    if "kv_capacity" in (estimate.stage1.limit, estimate.stage2 and estimate.stage2.limit):
        out.print("KV capacity limits: passes wait for the weights with too few tokens in them.")
    for note in estimate.notes:
        out.print(f"note: {note}")


def _headline(estimate: Estimate) -> str:
    model, machine, work = estimate.model, estimate.hardware, estimate.workload
    count = f"{machine.gpu_count} GPUs, " if machine.gpu_count > 1 else ""
    lengths = f"{work.prompt_tokens:g} prompt + {work.generated_tokens:g} generated tokens"
    kv = format_bytes_both(estimate.memory.kv_bytes)
    return (
        f"{model.name}: {model.total_parameters / 1e9:.1f} B parameters"
        f" ({model.active_parameters / 1e9:.1f} B active), weights {model.weight_format}"
        f" {format_bytes_both(estimate.memory.weights_bytes)}\n"
        f"{machine.name}: {count}{machine.description}\n"
        f"{work.requests:,} requests of {lengths}, lengths {work.distribution}\n"
        f"KV pool {kv} in {model.kv_format}: {estimate.memory.kv_capacity_tokens:,} tokens"
    )


def _throughput(estimate: Estimate) -> Table:
    table = new_table(
        "Throughput", ("", "tokens/s", "generated/s", "time", "limited by"), right=(1, 2, 3)
    )
    table.add_row("Stage 1, upper bound", *_stage1(estimate.stage1))
    if estimate.stage2 is not None:
        table.add_row("Stage 2, finite batch", *_stage2(estimate.stage2))
    table.add_row("Stage 2 with all costs", *_steady(estimate.steady))
    if estimate.simulation is not None:
        table.add_row("simulation", *_simulation(estimate.simulation))
    return table


def _stage1(stage: Stage1Report) -> tuple[str, ...]:
    rates = (rate(stage.tokens_per_s), rate(stage.generated_tokens_per_s))
    return (*rates, "", limit_text(stage.limit))


def _stage2(stage: Stage2Report) -> tuple[str, ...]:
    rates = (rate(stage.tokens_per_s), rate(stage.generated_tokens_per_s))
    return (*rates, format_seconds(stage.total_s), limit_text(stage.limit))


def _steady(stage: SteadyReport) -> tuple[str, ...]:
    rates = (rate(stage.tokens_per_s), rate(stage.generated_tokens_per_s))
    return (*rates, format_seconds(stage.total_s), limit_text(stage.limit))


def _simulation(run: SimulationReport) -> tuple[str, ...]:
    parts = sorted(run.share_by_limit.items(), key=lambda item: -item[1])
    limits = ", ".join(f"{limit_text(name)} {part:.0%}" for name, part in parts if part >= 0.005)
    rates = (rate(run.tokens_per_s), rate(run.generated_tokens_per_s))
    return (*rates, format_seconds(run.total_s), limits)


def _memory_table(title: str, budget: MemoryBudget) -> Table:
    table = new_table(title, ("", "size", ""), right=(1,))
    for item in budget.items:
        table.add_row(item.name, format_bytes_both(item.size_bytes), item.note)
    table.add_row("used", format_bytes_both(budget.used_bytes))
    if budget.available_bytes is None:
        table.add_row("available", NOT_KNOWN)
    else:
        fits = "fits" if budget.fits else "does not fit"
        table.add_row("available", format_bytes_both(budget.available_bytes), fits)
    return table


def _needs(needs: HostNeedsReport) -> Table:
    table = new_table("Host, at Stage 1", ("", "needed", "available", ""), right=(1, 2))
    table.add_row(
        "memory reads",
        format_bytes_per_s(needs.read_needed_bytes_per_s),
        _or_unknown(needs.read_available_bytes_per_s, format_bytes_per_s),
        _verdict(needs.read_enough),
    )
    table.add_row(
        "attention compute",
        format_flops_per_s(needs.cpu_needed_flops_per_s),
        _or_unknown(needs.cpu_available_flops_per_s, format_flops_per_s),
        _verdict(needs.cpu_enough),
    )
    return table


def _or_unknown(value: float | None, text: object) -> str:
    return NOT_KNOWN if value is None else str(text(value))  # type: ignore[operator]


def _verdict(enough: bool | None) -> str:
    return {None: "", True: "enough", False: "NOT enough"}[enough]
