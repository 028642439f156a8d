"""The shape of an estimate: what `moe-lens plan estimate --json` prints and the service returns.

Every field carries its unit in its name; None (JSON null) means not known. The schema's number
grows when a field is renamed, removed or changes its meaning, not when one is added.
"""

from dataclasses import asdict, dataclass
from typing import Any

from planner.hardware import Quantity
from planner.memory import MemoryBudget

SCHEMA = "moe-lens/estimate/1"


@dataclass(frozen=True)
class ModelReport:
    """What the estimate took the model to be."""

    name: str
    family: str
    n_layers: int
    n_experts: int
    experts_per_token: int
    weight_format: str
    kv_format: str
    total_parameters: int
    active_parameters: int
    parameters_by_kind: dict[str, int]


@dataclass(frozen=True)
class HardwareReport:
    """What the estimate took the machine to be; quantities are of one GPU."""

    name: str
    description: str
    gpu: str
    host: str
    gpu_count: int
    quantities: dict[str, Quantity | None]


@dataclass(frozen=True)
class WorkloadReport:
    """What was asked for; lengths are means where `distribution` is not "uniform"."""

    name: str
    prompt_tokens: float
    generated_tokens: float
    max_prompt_tokens: int | None
    requests: int
    distribution: str


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of weights and KV, and the uses of host and GPU memory item by item."""

    weights_bytes: int
    streamed_bytes_per_pass: int
    kv_bytes_per_token: int
    kv_bytes: float
    kv_capacity_tokens: int
    block_tokens: int
    resident_bytes: float
    resident_layers: int
    spare_gpu_bytes: float | None
    host: MemoryBudget
    gpu: MemoryBudget


@dataclass(frozen=True)
class Stage1Report:
    """The upper bound (Eqs 1-4): no batch ends, no block has a remainder. `limit` is "kv_capacity"
    or "gpu"."""

    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    kv_tokens_per_s: float | None
    gpu_tokens_per_s: float | None
    pme: float
    stream_s: float
    saturation_tokens: float | None
    gpu_utilisation_share: float | None


@dataclass(frozen=True)
class HostNeedsReport:
    """What Stage 1 asks of the host (Eqs 5 and 6), beside what it has."""

    kv_read_bytes_per_s: float
    read_needed_bytes_per_s: float
    read_available_bytes_per_s: float | None
    read_enough: bool | None
    cpu_needed_flops_per_s: float
    cpu_available_flops_per_s: float | None
    cpu_enough: bool | None


@dataclass(frozen=True)
class Stage2Report:
    """A finite batch in paged blocks (Eqs 8-13), q prompts started in every pass."""

    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    io_tokens_per_s: float
    gpu_tokens_per_s: float | None
    kv_prompts_per_step: float
    gpu_prompts_per_step: float | None
    prompts_per_step: float
    steps: float
    steady_tokens_per_step: float
    total_s: float


@dataclass(frozen=True)
class SteadyReport:
    """Stage 2 with the iteration's cost terms: K/q + g passes, each as long as its load takes (link
    with its slowdown, device, CPU attention, host memory). `limit` is "kv_capacity" or "gpu" where
    passes wait for the weights, as in Stage 2, else the slowest resource; `pass_s` and the seconds
    are of a pass at full load. A closed form, so that sizing can be done with it."""

    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    pass_s: float
    prompts_per_step: float
    step_tokens: float
    seconds_by_resource: dict[str, float]
    total_s: float


@dataclass(frozen=True)
class SimulationReport:
    """The real scheduler over all requests, an iteration at a time. With `scale` above 1 one in
    `scale` requests was simulated on one part in `scale` of pool and step."""

    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str
    total_s: float
    steps: int
    preemptions: int
    preemption_share: float
    mean_kv_use_share: float
    mean_step_tokens: float
    seconds_by_limit: dict[str, float]
    share_by_limit: dict[str, float]
    requests_simulated: int
    scale: float


@dataclass(frozen=True)
class ResidencyReport:
    """What keeping whole layers in the spare GPU memory would give (Stage 2)."""

    layers: int
    resident_bytes: int
    stage2_tokens_per_s: float
    gain_share: float


@dataclass(frozen=True)
class Estimate:
    """Everything about one case."""

    model: ModelReport
    hardware: HardwareReport
    workload: WorkloadReport
    memory: MemoryReport
    stage1: Stage1Report
    host_needs: HostNeedsReport | None
    stage2: Stage2Report | None
    steady: SteadyReport
    simulation: SimulationReport | None
    residency: ResidencyReport | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; its keys are the fields' names."""
        data = {"schema": SCHEMA, **asdict(self)}
        for place, budget in (("host", self.memory.host), ("gpu", self.memory.gpu)):
            data["memory"][place].update(
                used_bytes=budget.used_bytes, free_bytes=budget.free_bytes, fits=budget.fits
            )
        return data
