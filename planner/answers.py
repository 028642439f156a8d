"""Answers to size, compare, explain and published as tables for people."""

from collections.abc import Iterable, Sequence

from planner.compare import ComparedSystem
from planner.explanation import Explanation
from planner.explanation import number as exact
from planner.published import PublishedRow, mean_error
from planner.sizing import MachineOption, SizeOption, SizeReport
from planner.tables import console, new_table, rate, share
from planner.units import (
    format_bytes,
    format_bytes_both,
    format_bytes_per_s,
    format_flops_per_s,
)
from planner.words import limit_text


def print_size(found: SizeReport) -> None:
    """What reaches the target, one resource at a time, and what each change gains."""
    out = console()
    verdict = "reached" if found.reached else "not reached"
    out.print(
        f"target {rate(found.target_tokens_per_s)} tokens/s ({found.figure}): {verdict} by this"
        f" machine with {rate(found.present_tokens_per_s)}, limited by"
        f" {limit_text(found.present_limit)}\n"
    )
    table = new_table(
        "One resource changed, all else as it is",
        ("resource", "now", "least that does", "tokens/s"),
        right=(1, 2, 3),
    )
    for option in found.options:
        now, least = _amount(option, option.present), _amount(option, option.least)
        table.add_row(option.resource, now, least, _known(option.tokens_per_s))
    out.print(table)
    _print_reasons((option.resource, option.why) for option in found.options)
    if found.changes:
        out.print()
        out.print(_changes(found))
    if found.machines:
        out.print()
        out.print(_machines(found.machines))
        _print_reasons((option.hardware, option.why) for option in found.machines)


def _print_reasons(named: Iterable[tuple[str, str]]) -> None:
    """Why something does not reach the target, below the table that leaves it out."""
    for name, why in named:
        if why:
            console().print(f"  {name}: {why}")


def _amount(option: SizeOption, value: float | None) -> str:
    if value is None:
        return "-"
    texts = {
        "_bytes_per_s": format_bytes_per_s,
        "_flops_per_s": format_flops_per_s,
        "_bytes": format_bytes_both,
    }
    for suffix, text in texts.items():
        if option.field.endswith(suffix):
            return text(value)
    return f"{value:g}"


def _known(value: float | None) -> str:
    return "-" if value is None else rate(value)


def _changes(found: SizeReport) -> object:
    table = new_table(
        "One change each, the best first", ("change", "tokens/s", "gain", ""), right=(1, 2)
    )
    for change in found.changes:
        gain = "-" if change.gain_share is None else f"{change.gain_share:+.0%}"
        table.add_row(change.change, _known(change.tokens_per_s), gain, change.why)
    return table


def _machines(options: Sequence[MachineOption]) -> object:
    table = new_table(
        "Other machines, the least host memory with each",
        ("machine", "GPUs", "link each", "host memory", "tokens/s"),
        right=(1, 2, 3, 4),
    )
    for option in options:
        link, least = option.link_h2d_bytes_per_s, option.least_host_memory_bytes
        table.add_row(
            option.hardware,
            str(option.gpu_count),
            "-" if link is None else format_bytes_per_s(link),
            "-" if least is None else format_bytes(least),
            _known(option.tokens_per_s),
        )
    return table


def print_comparison(rows: Sequence[ComparedSystem]) -> None:
    """Generated tokens per second of each system."""
    columns = ("system", "generated/s", "promised by its model", "ours over it", "limited by", "N")
    table = new_table("", columns, right=(1, 2, 3, 5))
    for row in rows:
        policy = row.policy or {}
        table.add_row(
            row.system,
            _known(row.generated_tokens_per_s),
            _known(row.claimed_generated_tokens_per_s),
            "-" if row.ratio is None else f"{row.ratio:.1f}x",
            limit_text(row.limit),
            str(policy.get("batch_sequences", "-")),
        )
    console().print(table)


def print_published(rows: Sequence[PublishedRow]) -> None:
    """Measured figures with both predictions; errors are predicted over measured, minus one."""
    columns = ("hardware", "model", "system", "g", "measured", "claimed", "expected", "error")
    table = new_table("Generated tokens per second", columns, right=(3, 4, 5, 6, 7))
    for row in rows:
        error = row.expected_error
        table.add_row(
            row.hardware,
            row.model,
            row.system,
            str(row.generated_tokens),
            rate(row.measured_tokens_per_s),
            _known(row.claimed_tokens_per_s),
            _known(row.expected_tokens_per_s),
            "-" if error is None else f"{error:+.0%}",
        )
    out = console()
    out.print(table)
    single = [row for row in rows if not row.hardware.startswith("4x")]
    for name, chosen in (("single-GPU rows", single), ("all rows", rows)):
        claimed = share(mean_error(row.claimed_error for row in chosen))
        expected = share(mean_error(row.expected_error for row in chosen))
        out.print(f"mean error over {len(chosen)} {name}: claimed {claimed}, expected {expected}")


def print_explanations(rows: Sequence[Explanation]) -> None:
    """Figure, formula, and numbers put in, a paragraph each."""
    out = console()
    for row in rows:
        source = f" ({row.source})" if row.source else ""
        unit = f" {row.unit}" if row.unit else ""
        out.print(f"{row.figure}: {row.meaning}{source}", markup=False)
        out.print(f"    = {row.formula}", markup=False)
        out.print(f"    = {row.numbers}", markup=False)
        out.print(f"    = {exact(row.value)}{unit}\n", markup=False)
