"""The catalogue as tables for people."""

from typing import Any

from planner.hardware import HardwareSpec, Quantity
from planner.tables import NOT_KNOWN, console, new_table
from planner.units import (
    format_bytes,
    format_bytes_per_s,
    format_flops_per_s,
    format_seconds,
)

_UNITS = (
    ("_bytes_per_s", format_bytes_per_s),
    ("_flops_per_s", format_flops_per_s),
    ("_bytes", format_bytes),
    ("_s", format_seconds),
)


def quantity_text(field: str, quantity: Quantity | None) -> str:
    """A quantity in the unit that its field's name ends in."""
    if quantity is None:
        return NOT_KNOWN
    for suffix, text in _UNITS:
        if field.endswith(suffix):
            return text(quantity.value)
    return f"{quantity.value:g}"


def print_models(entries: list[dict[str, Any]]) -> None:
    """Models: parameters, sizes, KV."""
    columns = ("model", "family", "parameters", "active", "weights", "format", "KV per token")
    table = new_table("", columns, right=(2, 3, 4, 6))
    for entry in entries:
        table.add_row(
            entry["name"],
            entry["family"],
            f"{entry['total_parameters'] / 1e9:.1f} B",
            f"{entry['active_parameters'] / 1e9:.1f} B",
            format_bytes(entry["weights_bytes"]),
            entry["weight_format"],
            format_bytes(entry["kv_bytes_per_token"]),
        )
    console().print(table)


def print_machines(listed: dict[str, Any]) -> None:
    """Machines: the values that matter most; `hardware NAME` shows all with their provenance."""
    columns = ("machine", "GPU memory", "compute", "link", "host memory", "host reads", "")
    fields = (
        "gpu_memory_bytes",
        "gpu_sustained_flops_per_s",
        "link_h2d_bytes_per_s",
        "host_memory_bytes",
        "host_read_bytes_per_s",
    )
    table = new_table("", columns, right=(1, 2, 3, 4, 5))
    for data in listed["machines"]:
        spec = HardwareSpec.from_json(data)
        values = [quantity_text(field, getattr(spec, field)) for field in fields]
        count = f"{spec.gpu_count} GPUs, each as shown; " if spec.gpu_count > 1 else ""
        table.add_row(spec.name, *values, count + spec.description)
    out = console()
    out.print(table)
    out.print(f"\nGPUs for GPU+HOST: {', '.join(listed['gpus'])}")
    out.print(f"hosts for GPU+HOST: {', '.join(listed['hosts'])}")


def print_machine(spec: HardwareSpec) -> None:
    """Every quantity of a machine with its provenance."""
    out = console()
    out.print(f"{spec.name}: {spec.description}")
    table = new_table("", ("quantity", "value", "provenance", "source"), right=(1,))
    for field, quantity in spec.quantities().items():
        origin = ("", "") if quantity is None else (quantity.provenance, quantity.source)
        table.add_row(field, quantity_text(field, quantity), *origin)
    out.print(table)
