"""The inverse of an estimate: what a machine needs to reach a target, and what helps most."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from planner import catalogue
from planner.case import AUTO, DEFAULT_BLOCK_TOKENS, Case, make_case
from planner.errors import InvalidInputError, nearest
from planner.estimate import Detail, estimate
from planner.hardware import HardwareSpec, Quantity
from planner.inputs import CaseInputs
from planner.report import Estimate
from planner.spec import ModelSpec
from planner.words import limit_text
from planner.workload import Workload

SCHEMA = "moe-lens/size/1"
#: A returned amount is at most this much above the least that reaches the target.
PRECISION = 1.002
#: With 5 % less of the resource the target is not reached; amounts are lowered until that holds.
_LESS = 0.95
#: Only amounts between these multiples of what the machine has are tried.
_MOST = 64.0
_LEAST = 1 / 64
_MOST_GPUS = 16


class Figure(Enum):
    """The figure of an estimate that has to reach the target, by its name in the JSON."""

    STEADY = "steady.tokens_per_s"
    STAGE2 = "stage2.tokens_per_s"
    SIMULATION = "simulation.tokens_per_s"

    @property
    def detail(self) -> Detail:
        return Detail.SCALED if self is Figure.SIMULATION else Detail.NONE

    def of(self, found: Estimate) -> "Outcome":
        by_figure = {
            Figure.STEADY: found.steady,
            Figure.STAGE2: found.stage2,
            Figure.SIMULATION: found.simulation,
        }
        part = by_figure[self] or found.steady
        return Outcome(part.tokens_per_s, part.limit)


@dataclass(frozen=True)
class Outcome:
    """Throughput and what limits it; zero, and why, where the case cannot run."""

    tokens_per_s: float
    limit: str


@dataclass(frozen=True)
class Target:
    """What is to be reached; exactly one is given."""

    all_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    within_s: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in vars(self).values() if value is not None]
        if len(given) != 1:
            problem = "give one of --tokens-per-s, --generated-per-s and --within"
            raise InvalidInputError("target", problem)
        if not 0 < given[0] < math.inf:
            raise InvalidInputError("target", f"must be above 0, is {given[0]:g}")

    def tokens_per_s(self, workload: Workload) -> float:
        """Prompt and generated tokens per second."""
        if self.all_tokens_per_s is not None:
            return self.all_tokens_per_s
        if self.within_s is not None:
            return workload.total_tokens / self.within_s
        total = workload.prompt_tokens + workload.generated_tokens
        return (self.generated_tokens_per_s or 0.0) * total / workload.generated_tokens


@dataclass(frozen=True)
class Problem:
    """What is to be sized. The KV pool fills host memory; `resident` as in `make_case`."""

    model: ModelSpec
    hardware: HardwareSpec
    workload: Workload
    target_tokens_per_s: float
    figure: Figure = Figure.STEADY
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    resident: float | str = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.target_tokens_per_s < math.inf:
            raise InvalidInputError("target", f"must be above 0, is {self.target_tokens_per_s}")

    @staticmethod
    def of(inputs: CaseInputs, target: "Target", figure: str) -> "Problem":
        """A problem from texts. The KV pool is what is looked for, so `kv` must not be given."""
        if inputs.kv is not None:
            raise InvalidInputError("kv", "the pool fills host memory here; give --ram instead")
        by_name = {f.name.lower(): f for f in Figure}
        if figure not in by_name:
            problem = f"unknown figure {figure!r}; {nearest(figure, by_name)}"
            raise InvalidInputError("by", problem)
        workload = inputs.find_workload()
        return Problem(
            model=inputs.find_model(),
            hardware=inputs.find_hardware(),
            workload=workload,
            target_tokens_per_s=target.tokens_per_s(workload),
            figure=by_name[figure],
            block_tokens=inputs.block_tokens(),
            resident=inputs.resident_policy(),
        )

    def case(self) -> Case:
        return make_case(
            self.model,
            self.hardware,
            self.workload,
            block_tokens=self.block_tokens,
            resident=self.resident,
        )

    def outcome(self) -> Outcome:
        """What the machine as it is gives."""
        try:
            found = estimate(self.case(), self.figure.detail)
        except InvalidInputError as error:
            return Outcome(0.0, str(error))
        if found.memory.gpu.fits is False:
            return Outcome(0.0, "GPU memory does not hold a buffer of two layers and activations")
        return self.figure.of(found)

    def reached(self) -> bool:
        return self.outcome().tokens_per_s >= self.target_tokens_per_s

    def with_amount(self, resource: "Resource", amount: float) -> "Problem":
        """The problem on a machine with `amount` of a resource."""
        machine = resource.set(self.hardware, amount)
        return replace(self, hardware=machine, resident=resource.resident or self.resident)


@dataclass(frozen=True)
class Resource:
    """Something a machine can have more or less of. `field` is what an amount counts; `others`
    grow with it. `resident`: how GPU memory is spent while this resource is varied."""

    name: str
    field: str
    others: tuple[str, ...] = ()
    resident: str | None = None

    def present(self, machine: HardwareSpec) -> float | None:
        return machine.value(self.field)

    def set(self, machine: HardwareSpec, amount: float) -> HardwareSpec:
        factor = amount / machine.require(self.field)
        changed: dict[str, Any] = {self.field: Quantity(amount, "assumed", "sized")}
        for other in self.others:
            value = machine.value(other)
            if value is not None:
                changed[other] = Quantity(value * factor, "assumed", "sized")
        return replace(machine, **changed)


HOST_MEMORY = Resource("host memory", "host_memory_bytes")
LINK = Resource("link", "link_h2d_bytes_per_s", ("link_d2h_bytes_per_s",))
GPU_COMPUTE = Resource("GPU compute", "gpu_sustained_flops_per_s", ("gpu_flops_per_s",))
GPU_MEMORY = Resource("GPU memory for resident layers", "gpu_memory_bytes", (), AUTO)
HOST_BANDWIDTH = Resource(
    "host memory bandwidth", "host_read_bytes_per_s", ("attention_bytes_per_s",)
)
RESOURCES = (HOST_MEMORY, LINK, GPU_COMPUTE, GPU_MEMORY, HOST_BANDWIDTH)


@dataclass(frozen=True)
class SizeOption:
    """The least of one resource that reaches the target with all else as it is; None: none does,
    and `why`."""

    resource: str
    field: str
    present: float | None
    least: float | None
    tokens_per_s: float | None
    why: str


@dataclass(frozen=True)
class MachineOption:
    """The least host memory with which another machine reaches the target."""

    hardware: str
    gpu_count: int
    link_h2d_bytes_per_s: float | None
    least_host_memory_bytes: float | None
    tokens_per_s: float | None
    why: str


@dataclass(frozen=True)
class ChangeGain:
    """What one change does to the machine as it is; None where it cannot be made, and `why`."""

    change: str
    tokens_per_s: float | None
    gain_share: float | None
    why: str


@dataclass(frozen=True)
class SizeReport:
    """The answer. `figure` names the number of an estimate that reaches the target."""

    figure: str
    target_tokens_per_s: float
    present_tokens_per_s: float
    present_limit: str
    reached: bool
    options: tuple[SizeOption, ...]
    machines: tuple[MachineOption, ...]
    changes: tuple[ChangeGain, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def size(problem: Problem, *, machines: bool = True) -> SizeReport:
    """Options that reach the target, other machines that do (unless `machines` is false), and
    changes by their gain, the largest first."""
    now = problem.outcome()
    return SizeReport(
        figure=problem.figure.value,
        target_tokens_per_s=problem.target_tokens_per_s,
        present_tokens_per_s=now.tokens_per_s,
        present_limit=now.limit,
        reached=now.tokens_per_s >= problem.target_tokens_per_s,
        options=(*(least(problem, resource) for resource in RESOURCES), least_gpus(problem)),
        machines=tuple(other_machines(problem)) if machines else (),
        changes=tuple(sorted(changes(problem, now), key=lambda c: -(c.gain_share or -1.0))),
    )


def least(problem: Problem, resource: Resource) -> SizeOption:
    """The least amount of a resource that reaches the target, within _LEAST and _MOST times what
    the machine has."""
    present = resource.present(problem.hardware)
    if present is None:
        why = f"{problem.hardware.name} does not say how much it has"
        return SizeOption(resource.name, resource.field, None, None, None, why)

    def reached(amount: float) -> bool:
        return problem.with_amount(resource, amount).reached()

    most = present * _MOST
    if not reached(most):
        best = problem.with_amount(resource, most).outcome()
        why = _why(best, f"even {_MOST:.0f} times as much")
        return SizeOption(resource.name, resource.field, present, None, None, why)
    floor = present * _LEAST
    if reached(floor):
        found = problem.with_amount(resource, floor).outcome()
        why = "less would do: it does not limit this figure"
        return SizeOption(resource.name, resource.field, present, floor, found.tokens_per_s, why)
    amount = _least_between(reached, floor, present if reached(present) else most)
    found = problem.with_amount(resource, amount).outcome()
    return SizeOption(resource.name, resource.field, present, amount, found.tokens_per_s, "")


def least_gpus(problem: Problem) -> SizeOption:
    """The fewest GPUs that reach the target, each with its own link."""
    present = float(problem.hardware.gpu_count)
    for count in range(1, _MOST_GPUS + 1):
        found = replace(problem, hardware=replace(problem.hardware, gpu_count=count)).outcome()
        if found.tokens_per_s >= problem.target_tokens_per_s:
            return SizeOption("GPUs", "gpu_count", present, float(count), found.tokens_per_s, "")
    why = _why(found, f"even {_MOST_GPUS} GPUs")
    return SizeOption("GPUs", "gpu_count", present, None, None, why)


def other_machines(problem: Problem) -> Iterator[MachineOption]:
    """The least host memory with which each machine of the catalogue reaches the target."""
    for name in catalogue.hardware_names():
        machine = catalogue.hardware(name)
        option = least(replace(problem, hardware=machine), HOST_MEMORY)
        yield MachineOption(
            hardware=name,
            gpu_count=machine.gpu_count,
            link_h2d_bytes_per_s=machine.value("link_h2d_bytes_per_s"),
            least_host_memory_bytes=option.least,
            tokens_per_s=option.tokens_per_s,
            why=option.why,
        )


def changes(problem: Problem, now: Outcome) -> Iterator[ChangeGain]:
    """Each single change, with the throughput after it."""

    def twice(resource: Resource) -> Callable[[], Problem]:
        return lambda: problem.with_amount(resource, 2 * problem.hardware.require(resource.field))

    def formats(weights: str | None = None, kv: str | None = None) -> Callable[[], Problem]:
        return lambda: replace(problem, model=problem.model.with_formats(weights, kv))

    count = problem.hardware.gpu_count
    tried: tuple[tuple[str, Callable[[], Problem]], ...] = (
        ("twice the host memory", twice(HOST_MEMORY)),
        ("a link twice as fast", twice(LINK)),
        ("spare GPU memory spent on resident layers", lambda: replace(problem, resident=AUTO)),
        ("twice the GPU memory, spent on resident layers", twice(GPU_MEMORY)),
        ("KV in 8 bits", formats(kv="int8")),
        ("weights in 4 bits", formats(weights="int4")),
        ("twice the GPU compute", twice(GPU_COMPUTE)),
        ("twice the host memory bandwidth", twice(HOST_BANDWIDTH)),
        (
            f"{count + 1} GPUs",
            lambda: replace(problem, hardware=replace(problem.hardware, gpu_count=count + 1)),
        ),
    )
    for name, make in tried:
        yield _gain(name, make, now)


def _gain(name: str, make: Callable[[], Problem], now: Outcome) -> ChangeGain:
    try:
        after = make().outcome()
    except InvalidInputError as error:
        return ChangeGain(name, None, None, str(error))
    if after.tokens_per_s == 0:
        return ChangeGain(name, None, None, after.limit)
    gain = after.tokens_per_s / now.tokens_per_s - 1 if now.tokens_per_s else math.inf
    return ChangeGain(name, after.tokens_per_s, gain, "")


def _least_between(reached: Callable[[float], bool], low: float, high: float) -> float:
    """An amount that reaches the target while 5 % less does not, `low` not and `high` does: found
    by bisection, and again from below while a ripple of the simulation lets 5 % less do."""
    amount = _bisect(reached, low, high)
    while amount * _LESS > low and reached(amount * _LESS):
        amount = _bisect(reached, low, amount * _LESS)
    return amount


def _bisect(reached: Callable[[float], bool], low: float, high: float) -> float:
    """An amount that reaches the target, at most PRECISION above one that does not."""
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _why(best: Outcome, amount: str) -> str:
    if best.tokens_per_s == 0:
        return f"{amount} cannot run it: {best.limit}"
    return f"{amount} gives {best.tokens_per_s:.0f} tokens/s; limited by {limit_text(best.limit)}"
