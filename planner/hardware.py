"""A machine as the planner sees it: rates and capacities, each with where it is from."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from planner.errors import InvalidInputError, nearest, reject_unknown_keys

SCHEMA = "moe-lens/hardware/1"

PROVENANCES = ("measured", "datasheet", "assumed")
_PER_GPU = (
    "gpu_flops_per_s",
    "gpu_sustained_flops_per_s",
    "gpu_memory_bytes",
    "gpu_memory_bytes_per_s",
    "link_h2d_bytes_per_s",
    "link_d2h_bytes_per_s",
)


@dataclass(frozen=True)
class Quantity:
    """A number with its origin: "measured", "datasheet" or "assumed"; `source` says more."""

    value: float
    provenance: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            problem = (
                f"unknown provenance {self.provenance!r}; {nearest(self.provenance, PROVENANCES)}"
            )
            raise InvalidInputError("provenance", problem)
        if not math.isfinite(self.value) or self.value < 0:
            raise InvalidInputError("value", f"must be a finite number >= 0, is {self.value!r}")

    def to_json(self) -> dict[str, object]:
        return {"value": self.value, "provenance": self.provenance, "source": self.source}


@dataclass(frozen=True)
class Curve:
    """Seconds measured at some counts, which ascend; with its origin, as a `Quantity`."""

    points: tuple[tuple[float, float], ...]
    provenance: str
    source: str = ""

    def __post_init__(self) -> None:
        for value in (number for point in self.points for number in point):
            Quantity(value, self.provenance, self.source)
        counts = [count for count, _ in self.points]
        if len(counts) < 2 or any(a >= b for a, b in pairwise(counts)):
            raise InvalidInputError("points", "must be at least two, with ascending counts")

    def to_json(self) -> dict[str, object]:
        points = [list(point) for point in self.points]
        return {"points": points, "provenance": self.provenance, "source": self.source}


@dataclass(frozen=True)
class HardwareSpec:
    """One host with `gpu_count` equal GPUs, each on its own link.

    None means not known; formulas then leave the term out and reports say so. The device_* values
    and `n_real_tokens` belong to one layer of the model that the profile was taken with.
    """

    name: str
    description: str = ""
    device: str = ""  # "cuda" or "cpu"; empty: not said
    gpu: str = ""
    host: str = ""
    gpu_count: int = 1
    profiled_model: str = ""
    #: Dense 16-bit tensor peak of one GPU, and what large GEMMs of the model sustain.
    gpu_flops_per_s: Quantity | None = None
    gpu_sustained_flops_per_s: Quantity | None = None
    gpu_memory_bytes: Quantity | None = None
    gpu_memory_bytes_per_s: Quantity | None = None
    #: Large copies from pinned memory, per GPU.
    link_h2d_bytes_per_s: Quantity | None = None
    link_d2h_bytes_per_s: Quantity | None = None
    #: kappa: share of the CPU attention time that a concurrent transfer is longer by.
    link_slowdown: Quantity | None = None
    host_memory_bytes: Quantity | None = None
    host_read_bytes_per_s: Quantity | None = None
    cpu_cores: Quantity | None = None
    cpu_flops_per_s: Quantity | None = None
    #: KV bytes that decode attention reads per second with all cores, and its cost per sequence.
    attention_bytes_per_s: Quantity | None = None
    attention_sequence_s: Quantity | None = None
    #: CPU attention of one layer: for any work at all, and for one query token and KV token of a
    #: prefill chunk.
    attention_fixed_s: Quantity | None = None
    attention_pair_s: Quantity | None = None
    #: G(x) = a0 + a1 x of one layer for x tokens, and where it meets the layer's transfer time.
    device_time_fixed_s: Quantity | None = None
    device_time_per_token_s: Quantity | None = None
    n_real_tokens: Quantity | None = None
    #: The same G at the counts where it was measured; used instead of the line where it is known.
    device_time_curve: Curve | None = None
    #: Scheduling and control messages of one iteration that execution does not hide.
    step_overhead_s: Quantity | None = None
    step_overhead_sequence_s: Quantity | None = None
    #: Final norm, head and sampling of one iteration: for any token, and for each sampled token.
    head_fixed_s: Quantity | None = None
    head_token_s: Quantity | None = None

    def __post_init__(self) -> None:
        if self.gpu_count < 1:
            raise InvalidInputError("gpu_count", f"must be at least 1, is {self.gpu_count}")
        if self.device not in ("", "cuda", "cpu"):
            raise InvalidInputError("device", f"must be 'cuda' or 'cpu', is {self.device!r}")

    def value(self, field: str) -> float | None:
        """The number behind `field`, or None where it is not known."""
        quantity: Quantity | None = getattr(self, field)
        return None if quantity is None else quantity.value

    def require(self, field: str) -> float:
        """The number behind `field`; InvalidInputError where the machine does not give it."""
        value = self.value(field)
        if value is None:
            raise InvalidInputError(f"hardware.{field}", f"not given for {self.name}")
        return value

    def quantities(self) -> dict[str, Quantity | None]:
        """Every quantity by its name, unknown ones included."""
        return {name: getattr(self, name) for name in QUANTITY_FIELDS}

    @property
    def shares_cores(self) -> bool:
        """Whether the device computes on the host's own cores: it says so, or nothing of a GPU is
        known."""
        if self.device:
            return self.device == "cpu"
        return not any((self.gpu, self.gpu_flops_per_s, self.gpu_sustained_flops_per_s))

    def combined(self) -> "HardwareSpec":
        """All GPUs as one: each streams and computes its equal share of every layer over a link of
        its own, so rates and memories add up. Measured device times are of the whole already."""
        scaled: dict[str, Quantity | None] = {}
        for name in _PER_GPU if self.gpu_count > 1 else ():
            one: Quantity | None = getattr(self, name)
            if one is not None:
                source = f"{self.gpu_count} x {one.source}"
                scaled[name] = Quantity(one.value * self.gpu_count, one.provenance, source)
        return replace(self, gpu_count=1, **scaled)  # type: ignore[arg-type]

    def with_values(self, provenance: str, source: str, **values: float | None) -> "HardwareSpec":
        """A copy with some quantities set; a value of None makes a quantity unknown."""
        reject_unknown_keys(values, QUANTITY_FIELDS, "hardware")
        changed = {
            name: None if value is None else Quantity(value, provenance, source)
            for name, value in values.items()
        }
        return replace(self, **changed)  # type: ignore[arg-type]

    # -- JSON -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON object; unknown quantities are null."""
        plain = {name: getattr(self, name) for name in PLAIN_FIELDS}
        rates = {
            name: None if quantity is None else quantity.to_json()
            for name, quantity in self.quantities().items()
        }
        curves = {
            name: None if curve is None else curve.to_json()
            for name, curve in ((name, getattr(self, name)) for name in CURVE_FIELDS)
        }
        return {"schema": SCHEMA, **plain, **rates, **curves}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "hardware") -> "HardwareSpec":
        """Read what `to_json` wrote. Unknown keys, wrong types and other schemas are errors."""
        if data.get("schema") != SCHEMA:
            raise InvalidInputError(
                f"{where}.schema", f"must be {SCHEMA!r}, is {data.get('schema')!r}"
            )
        known = ("schema", *PLAIN_FIELDS, *QUANTITY_FIELDS, *CURVE_FIELDS)
        reject_unknown_keys(data, known, where)
        if not isinstance(data.get("name"), str):
            raise InvalidInputError(f"{where}.name", "must be a text")
        values: dict[str, Any] = {}
        for name in PLAIN_FIELDS:
            if name in data:
                values[name] = _plain(data[name], name, where)
        for name in QUANTITY_FIELDS:
            values[name] = parse_quantity(data.get(name), f"{where}.{name}")
        for name in CURVE_FIELDS:
            values[name] = parse_curve(data.get(name), f"{where}.{name}")
        return HardwareSpec(**values)

    @staticmethod
    def load(path: str | Path) -> "HardwareSpec":
        """Read a hardware file; InvalidInputError says what is wrong with it."""
        file = Path(path)
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise InvalidInputError("hardware", f"cannot read {file}: {error.strerror}") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InvalidInputError("hardware", f"{file} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise InvalidInputError("hardware", f"{file} holds no JSON object")
        return HardwareSpec.from_json(data, where=str(file))

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")


def parse_quantity(data: Any, where: str) -> Quantity | None:
    """A quantity from JSON: null, or an object of value, provenance and source."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise InvalidInputError(where, "must be null or an object of value, provenance, source")
    reject_unknown_keys(data, ("value", "provenance", "source"), where)
    value = data.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError(f"{where}.value", f"must be a number, is {value!r}")
    try:
        return Quantity(float(value), str(data.get("provenance")), str(data.get("source", "")))
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}.{error.field}", error.problem) from error


def parse_curve(data: Any, where: str) -> Curve | None:
    """A curve from JSON: null, or an object of points, provenance and source."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise InvalidInputError(where, "must be null or an object of points, provenance, source")
    reject_unknown_keys(data, ("points", "provenance", "source"), where)
    try:
        points = tuple((float(count), float(seconds)) for count, seconds in data["points"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{where}.points", "must be pairs of numbers") from error
    try:
        return Curve(points, str(data.get("provenance")), str(data.get("source", "")))
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}.{error.field}", error.problem) from error


def _plain(value: Any, name: str, where: str) -> Any:
    wanted = int if name == "gpu_count" else str
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise InvalidInputError(f"{where}.{name}", f"must be of type {wanted.__name__}")
    return value


QUANTITY_FIELDS = tuple(f.name for f in fields(HardwareSpec) if Quantity in get_args(f.type))
CURVE_FIELDS = tuple(f.name for f in fields(HardwareSpec) if Curve in get_args(f.type))
PLAIN_FIELDS = tuple(
    f.name for f in fields(HardwareSpec) if f.name not in (*QUANTITY_FIELDS, *CURVE_FIELDS)
)
