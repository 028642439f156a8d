"""What the catalogue holds, as lists for people and programs."""

from dataclasses import asdict
from typing import Any

from planner import catalogue
from planner.case import find_hardware, find_model
from planner.estimate import model_report
from planner.hardware import HardwareSpec
from planner.spec import ModelSpec


def model_entries(name: str | None = None) -> list[dict[str, Any]]:
    """Every model of the catalogue, or the one named (also a checkpoint's folder)."""
    names = catalogue.model_names() if name is None else [name]
    return [_model_entry(find_model(each)) for each in names]


def one_machine(name: str) -> HardwareSpec:
    """A machine by name or from a file."""
    return find_hardware(name)


def machine_list() -> dict[str, Any]:
    """Machines, and the GPUs and hosts that can be joined as GPU+HOST."""
    machines = [catalogue.hardware(name) for name in catalogue.hardware_names()]
    return {
        "schema": "moe-lens/hardware-list/1",
        "machines": [machine.to_json() for machine in machines],
        "gpus": catalogue.gpu_names(),
        "hosts": catalogue.host_names(),
    }


def _model_entry(model: ModelSpec) -> dict[str, Any]:
    return {
        **asdict(model_report(model)),
        "weights_bytes": model.weights_bytes,
        "streamed_bytes_per_pass": model.streamed_bytes_per_pass,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "max_context_tokens": model.max_context_tokens,
    }
