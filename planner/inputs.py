"""A case as people write it: texts with units, from the command line, a sweep or a service."""

from dataclasses import dataclass, fields, replace
from typing import Any

from planner import catalogue
from planner.case import (
    AUTO,
    DEFAULT_BLOCK_TOKENS,
    Case,
    find_hardware,
    find_model,
    find_workload,
    make_case,
)
from planner.errors import InvalidInputError, nearest
from planner.hardware import HardwareSpec
from planner.spec import ModelSpec
from planner.units import parse_bytes, parse_bytes_per_s, parse_count
from planner.workload import Workload


@dataclass(frozen=True)
class CaseInputs:
    """What an estimate needs to be told, unparsed; None leaves the default. Sizes take GB and GiB,
    counts take 20000 and 20k. The field's name is the name that errors give.

    Model, hardware and workload may be the thing itself instead of its name. Without
    `local_files` names are looked up in the catalogue alone, never on the disk: what a service
    does with texts from elsewhere.
    """

    model: str | ModelSpec
    hardware: str | HardwareSpec
    prompt: str | None = None
    generate: str | None = None
    requests: str | None = None
    workload: str | Workload | None = None
    trace: str | None = None
    kv: str | None = None
    block: str | None = None
    resident: str | None = None
    weights: str | None = None
    kv_format: str | None = None
    gpus: str | None = None
    ram: str | None = None
    vram: str | None = None
    link: str | None = None
    local_files: bool = True

    def case(self) -> Case:
        """The checked case. Raises InvalidInputError naming the input that is wrong."""
        return make_case(
            self.find_model(),
            self.find_hardware(),
            self.find_workload(),
            kv_bytes=None if self.kv is None else parse_bytes(self.kv, "kv"),
            block_tokens=self.block_tokens(),
            resident=self.resident_policy(),
        )

    def block_tokens(self) -> int:
        return _count(self.block, "block") or DEFAULT_BLOCK_TOKENS

    def resident_policy(self) -> float | str:
        """Bytes of layers to keep on the GPU, or AUTO."""
        if self.resident is None or self.resident == AUTO:
            return self.resident or 0.0
        return float(parse_bytes(self.resident, "resident"))

    def find_model(self) -> ModelSpec:
        found = self.model
        if isinstance(found, str):
            found = find_model(found) if self.local_files else catalogue.model(found)
        return found.with_formats(self.weights, self.kv_format)

    def find_hardware(self) -> HardwareSpec:
        """The machine, with what the inputs change in it."""
        machine = self.hardware
        if isinstance(machine, str):
            look_up = find_hardware if self.local_files else catalogue.hardware
            machine = look_up(machine)
        if self.gpus is not None:
            machine = replace(machine, gpu_count=parse_count(self.gpus, "gpus"))
        changes: dict[str, float] = {}
        if self.ram is not None:
            changes["host_memory_bytes"] = parse_bytes(self.ram, "ram")
        if self.vram is not None:
            changes["gpu_memory_bytes"] = parse_bytes(self.vram, "vram")
        if self.link is not None:
            changes["link_h2d_bytes_per_s"] = parse_bytes_per_s(self.link, "link")
        return machine.with_values("assumed", "given", **changes) if changes else machine

    def find_workload(self) -> Workload:
        if self.trace is not None and not self.local_files:
            raise InvalidInputError("trace", "a file cannot be read from here")
        return find_workload(
            self.workload,
            self.trace,
            _count(self.prompt, "prompt"),
            _count(self.generate, "generate"),
            _count(self.requests, "requests"),
        )

    def with_input(self, name: str, value: str) -> "CaseInputs":
        """A copy with one input changed; an unknown name is answered with the nearest."""
        known = [field.name for field in fields(self) if field.name != "local_files"]
        if name not in known:
            raise InvalidInputError("over", f"unknown input {name!r}; {nearest(name, known)}")
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)


def _count(text: str | None, field: str) -> int | None:
    """A count of at least 1, or None where it was not given."""
    if text is None:
        return None
    value = parse_count(text, field)
    if value < 1:
        raise InvalidInputError(field, f"must be at least 1, is {value}")
    return value
