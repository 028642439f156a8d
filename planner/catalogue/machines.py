"""Machines of the catalogue: a GPU and a host, joined into a HardwareSpec.

What data sheets do not say is derived from what they do by the factors below and marked assumed;
`moe-lens profile` replaces it by measured values.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.catalogue.files import check_keys, entry, read_table
from planner.errors import NotFoundError, nearest, reject_unknown_keys
from planner.hardware import QUANTITY_FIELDS, HardwareSpec, Quantity, parse_quantity

#: Usable bytes per second and lane, after encoding (PCI Express base specification).
_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
#: Share of the link's rate that large pinned copies reach.
LINK_EFFICIENCY = 0.80
#: Share of the memory channels' rate that sequential reads reach (150 of 204.8 GB/s in the paper).
READ_EFFICIENCY = 0.73
#: Share of the read rate that decode attention reaches.
ATTENTION_EFFICIENCY = 0.80
#: Share of the tensor peak that large expert GEMMs sustain (97.6 of 150 TFLOP/s in the paper).
GEMM_EFFICIENCY = 0.65
#: kappa, as fitted to the paper's 210 GB case.
LINK_SLOWDOWN = 0.56
_MEMORY_BUS_BYTES = 8

_GPU_KEYS = ("title", "flops_per_s", "memory_bytes", "memory_bytes_per_s")
_HOST_KEYS = (
    "title",
    "memory",
    "cores",
    "base_hz",
    "flops_per_cycle",
    "memory_channels",
    "memory_transfers_per_s",
    "memory_bytes",
)
_PCIE_KEYS = ("pcie_generation", "pcie_lanes")
_DEFAULT_HOSTS = {
    "t4": "gcp-n1",
    "l4": "gcp-g2",
    "a10g": "aws-g5",
    "a40": "epyc7763",
    "l40s": "epyc9654",
    "rtx3090": "desktop-ddr4",
    "rtx4090": "desktop-ddr5",
    "rtx5090": "desktop-ddr5",
    "a100": "epyc7763",
    "h100": "xeon8480",
    "h200": "xeon8480",
}


def hardware_names() -> list[str]:
    """Names of whole machines. `hardware` also takes a GPU's name and GPU+HOST."""
    return sorted(read_table("machines"))


def gpu_names() -> list[str]:
    return sorted(read_table("gpus"))


def host_names() -> list[str]:
    return sorted(read_table("hosts"))


def hardware(name: str) -> HardwareSpec:
    """A machine by its name, a GPU (in its usual host), or "GPU+HOST".

    NotFoundError names the nearest machines and GPUs.
    """
    machines = read_table("machines")
    if name in machines:
        return _machine(name, machines[name])
    gpu, plus, host = name.partition("+")
    key = _gpu_key(gpu)
    if key is None:
        known = [*machines, *read_table("gpus")]
        problem = f"{name!r} is not in the catalogue; {nearest(name, known)}"
        raise NotFoundError("hardware", problem)
    return join(key, host if plus else _DEFAULT_HOSTS[key], name)


def _gpu_key(text: str) -> str | None:
    """The catalogue's key of a GPU as people write it: "RTX 4090", "4090", "NVIDIA L40S"."""
    plain = "".join(c for c in text.lower() if c.isalnum())
    for prefix in ("nvidia", "geforce"):
        plain = plain.removeprefix(prefix)
    return next((key for key in (plain, f"rtx{plain}") if key in read_table("gpus")), None)


def _machine(name: str, data: Mapping[str, Any]) -> HardwareSpec:
    where = f"machines.json.{name}"
    check_keys(data, ("gpu", "host", "gpu_count", "description", "overrides"), (), where)
    reject_unknown_keys(data["overrides"], QUANTITY_FIELDS, where)
    overrides: dict[str, Any] = {
        field: parse_quantity(value, f"{where}.{field}")
        for field, value in data["overrides"].items()
    }
    spec = join(data["gpu"], data["host"], name)
    description = data["description"]
    return replace(spec, gpu_count=data["gpu_count"], description=description, **overrides)


def join(gpu_name: str, host_name: str, name: str) -> HardwareSpec:
    """The machine that a GPU and a host of the catalogue make, one GPU in it."""
    gpu_data = entry("gpus", gpu_name, "gpu")
    host_data = entry("hosts", host_name, "host")
    gpu = _quantities(gpu_data, (*_GPU_KEYS, *_PCIE_KEYS), (), f"gpus.json.{gpu_name}")
    host = _quantities(
        host_data, (*_HOST_KEYS, *_PCIE_KEYS), ("read_bytes_per_s",), f"hosts.json.{host_name}"
    )
    read = host.get("read_bytes_per_s") or _read_rate(host)
    link = _link_rate(gpu, host)
    peak = gpu["flops_per_s"]
    return HardwareSpec(
        name=name,
        description=f"{gpu_data['title']} in {host_data['title']} ({host_data['memory']})",
        gpu=gpu_name,
        host=host_name,
        gpu_flops_per_s=peak,
        gpu_sustained_flops_per_s=_share(peak, GEMM_EFFICIENCY, "of the tensor peak"),
        gpu_memory_bytes=gpu["memory_bytes"],
        gpu_memory_bytes_per_s=gpu["memory_bytes_per_s"],
        link_h2d_bytes_per_s=link,
        link_d2h_bytes_per_s=link,
        link_slowdown=Quantity(LINK_SLOWDOWN, "assumed", "as on the paper's testbed"),
        host_memory_bytes=host["memory_bytes"],
        host_read_bytes_per_s=read,
        cpu_cores=host["cores"],
        cpu_flops_per_s=_cpu_flops(host),
        attention_bytes_per_s=_share(read, ATTENTION_EFFICIENCY, "of the host's read rate"),
    )


def _quantities(
    data: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...], where: str
) -> dict[str, Quantity]:
    check_keys(data, required, optional, where)
    texts = ("title", "memory")
    parsed = {k: parse_quantity(v, f"{where}.{k}") for k, v in data.items() if k not in texts}
    return {key: value for key, value in parsed.items() if value is not None}


def _share(whole: Quantity, share: float, of_what: str) -> Quantity:
    return Quantity(whole.value * share, "assumed", f"{share:.0%} {of_what}")


def _read_rate(host: Mapping[str, Quantity]) -> Quantity:
    channels, transfers = host["memory_channels"].value, host["memory_transfers_per_s"].value
    peak = channels * transfers * _MEMORY_BUS_BYTES
    source = f"{READ_EFFICIENCY:.0%} of {channels:.0f} x {transfers / 1e6:.0f} MT/s x 8 B"
    return Quantity(peak * READ_EFFICIENCY, "assumed", source)


def _link_rate(gpu: Mapping[str, Quantity], host: Mapping[str, Quantity]) -> Quantity:
    generation = int(min(gpu["pcie_generation"].value, host["pcie_generation"].value))
    lanes = min(gpu["pcie_lanes"].value, host["pcie_lanes"].value)
    rate = _LANE_BYTES_PER_S[generation] * lanes * LINK_EFFICIENCY
    source = f"{LINK_EFFICIENCY:.0%} of PCIe {generation}.0 x{lanes:.0f}"
    return Quantity(rate, "assumed", source)


def _cpu_flops(host: Mapping[str, Quantity]) -> Quantity:
    value = host["cores"].value * host["base_hz"].value * host["flops_per_cycle"].value
    return Quantity(value, host["cores"].provenance, "cores x base clock x FP32 FLOP per cycle")
