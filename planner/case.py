"""One case: a model, a machine, a workload, and how memory is divided between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from planner import catalogue, workload
from planner.costs import ExecutionMode, IterationCosts
from planner.errors import InvalidInputError
from planner.hardware import HardwareSpec
from planner.memory import (
    default_kv_bytes,
    resident_layers,
    spare_gpu_bytes,
    step_tokens_that_fit,
)
from planner.spec import ModelSpec
from planner.stage1 import gpu_tokens_per_second, stream_seconds
from planner.units import div_ceil, format_bytes_both
from planner.workload import Workload

DEFAULT_BLOCK_TOKENS = 16
#: `resident` that asks for as many layers as spare GPU memory holds.
AUTO = "auto"
#: Tokens of a step where no transfer sets a measure.
DEFAULT_STEP_TOKENS = 8192
_MOST_STEP_TOKENS = 2**20
#: A device is efficient where so much of its time is spent in proportion to the tokens.
_EFFICIENCY = 0.9


@dataclass(frozen=True)
class Case:
    """What an estimate is about. `kv_bytes` is the size of the KV pool, `resident_bytes` of the
    layers that stay on the GPU. Made by `make_case`, which checks it."""

    model: ModelSpec
    hardware: HardwareSpec
    workload: Workload
    kv_bytes: float
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    resident_bytes: float = 0.0

    @cached_property
    def costs(self) -> IterationCosts:
        """Cost terms of an iteration, all GPUs taken as one."""
        return iteration_costs(self.model, self.hardware, self.resident_share)

    @property
    def stream_s(self) -> float:
        """delta: seconds to move a pass's weights; zero where none are moved."""
        return streamed_seconds(self.costs)

    @property
    def gpu_tokens_per_s(self) -> float:
        """T_GPU: what the device computes when it never waits, or less where its memory does not
        hold the activations of so many tokens in one pass."""
        rate = device_tokens_per_s(self.model, self.hardware)
        return min(rate, self.step_tokens / self.stream_s) if self._memory_caps_step else rate

    @cached_property
    def step_tokens(self) -> int:
        """Most tokens in one iteration: n_real, or what GPU memory holds."""
        return min(self._n_real_tokens, max(1, self._step_tokens_that_fit))

    @property
    def _n_real_tokens(self) -> int:
        return n_real_tokens(self.model, self.hardware, self.costs)

    @property
    def _step_tokens_that_fit(self) -> int:
        return step_tokens_that_fit(self.model, self.hardware, self.resident_bytes)

    @property
    def _memory_caps_step(self) -> bool:
        return self.stream_s > 0 and self._step_tokens_that_fit < self._n_real_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        """M: tokens of the pool's whole blocks."""
        tokens = self.model.kv_capacity_tokens(self.kv_bytes)
        return tokens // self.block_tokens * self.block_tokens

    @property
    def resident_share(self) -> float:
        """Share of a pass's weights that are not streamed."""
        return min(1.0, self.resident_bytes / self.model.streamed_bytes_per_pass)


def make_case(
    model: ModelSpec,
    hardware: HardwareSpec,
    requests: Workload,
    *,
    kv_bytes: float | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    resident: float | str = 0.0,
) -> Case:
    """A checked case. Without `kv_bytes` the pool fills host memory; `resident` "auto" fills spare
    GPU memory.

    Raises InvalidInputError naming what is wrong and what would be right.
    """
    tokens = min(
        n_real_tokens(model, hardware, iteration_costs(model, hardware, 0.0)),
        max(1, step_tokens_that_fit(model, hardware, 0.0)),
    )
    if kv_bytes is None:
        kv_bytes = _fill_host(model, hardware, tokens)
    if resident == AUTO:
        spare = spare_gpu_bytes(model, hardware, tokens)
        resident = resident_layers(model, max(0.0, spare or 0.0))[1]
    elif isinstance(resident, str):
        raise InvalidInputError("resident", f"must be a size or {AUTO!r}, is {resident!r}")
    return check(Case(model, hardware, requests, kv_bytes, block_tokens, float(resident)))


def iteration_costs(
    model: ModelSpec, hardware: HardwareSpec, resident_share: float
) -> IterationCosts:
    """Cost terms; on a machine without a GPU attention and the rest share its cores."""
    if hardware.shares_cores:
        return IterationCosts.from_specs(
            model,
            hardware,
            resident_share=resident_share,
            mode=ExecutionMode.SHARED_CORES,
            prefill_on_cpu=True,
        )
    return IterationCosts.from_specs(model, hardware, resident_share=resident_share)


def streamed_seconds(costs: IterationCosts) -> float:
    """delta of these costs: all layers' streamed bytes over the link's rate."""
    if not costs.link_h2d_bytes_per_s:
        return 0.0
    streamed_bytes = costs.n_layers * costs.layer_bytes * (1 - costs.resident_share)
    return stream_seconds(streamed_bytes, costs.link_h2d_bytes_per_s)


def device_tokens_per_s(model: ModelSpec, hardware: HardwareSpec) -> float:
    """T_GPU of all GPUs. Raises InvalidInputError where no rate is known."""
    machine = hardware.combined()
    per_token_s = machine.value("device_time_per_token_s")
    if per_token_s and hardware.profiled_model in ("", model.name):
        return 1 / (model.n_layers * per_token_s)
    rate = machine.value("gpu_sustained_flops_per_s") or machine.require("gpu_flops_per_s")
    return gpu_tokens_per_second(rate, model.active_parameters)


def n_real_tokens(model: ModelSpec, hardware: HardwareSpec, costs: IterationCosts) -> int:
    """n_real: tokens at which the device takes as long for a layer as its transfer.

    A measured value wins. Where the transfer is so short that the device would be busy with so few
    tokens but not efficient, the tokens from which it is; DEFAULT_STEP_TOKENS where nothing is
    streamed.
    """
    measured = hardware.value("n_real_tokens")
    if measured and hardware.profiled_model in ("", model.name) and not costs.resident_share:
        return max(1, round(measured))
    layer_s = streamed_seconds(costs) / costs.n_layers
    if layer_s <= 0:
        return DEFAULT_STEP_TOKENS
    if costs.host_read_bytes_per_s:  # the slower of a link and the memory that feeds it
        streamed_bytes = costs.layer_bytes * (1 - costs.resident_share)
        layer_s = max(layer_s, streamed_bytes / costs.host_read_bytes_per_s)

    def device_s(tokens: float) -> float:
        return costs.n_groups * costs.device_time.at(tokens / costs.n_groups)

    slope_s = device_s(2.0 * _MOST_STEP_TOKENS) - device_s(_MOST_STEP_TOKENS)
    per_token_s = slope_s / _MOST_STEP_TOKENS
    hidden = _first_above(lambda tokens: device_s(tokens) >= layer_s)
    efficient = _first_above(lambda n: device_s(n) * _EFFICIENCY <= n * per_token_s)
    return max(1, round(max(hidden, efficient)))


def _first_above(holds: Callable[[float], bool]) -> float:
    """The least count, up to the most tokens of a step, for which a condition holds that goes on
    holding."""
    most = 1.0
    while not holds(most) and most < _MOST_STEP_TOKENS:
        most *= 2
    least = most / 2
    for _ in range(30):
        middle = (least + most) / 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    return most


def check(case: Case) -> Case:
    """The case itself, or InvalidInputError for what can never run."""
    if case.block_tokens < 1:
        raise InvalidInputError("block", f"must be at least 1 token, is {case.block_tokens}")
    longest = case.workload.max_sequence_tokens
    context = case.model.max_context_tokens
    if longest > context:
        problem = f"prompt and generated tokens are {longest} together; {case.model.name} has a"
        raise InvalidInputError("generate", f"{problem} context of {context}")
    needed_tokens = div_ceil(longest, case.block_tokens) * case.block_tokens
    if case.kv_capacity_tokens < needed_tokens:
        needed = format_bytes_both(needed_tokens * case.model.kv_bytes_per_token)
        problem = (
            f"{format_bytes_both(case.kv_bytes)} holds {case.kv_capacity_tokens} tokens; one"
            f" sequence of {longest} tokens needs {needed}"
        )
        raise InvalidInputError("kv", problem)
    if not 0 <= case.resident_bytes < math.inf:
        raise InvalidInputError("resident", f"must be at least 0, is {case.resident_bytes}")
    return case


def find_model(name: str) -> ModelSpec:
    """A model by its catalogue name, or from a checkpoint's folder or config.json."""
    path = Path(name)
    if path.is_dir():
        return ModelSpec.from_directory(path)
    if path.name == "config.json" and path.is_file():
        return ModelSpec.from_directory(path.parent)
    if "/" in name or name.endswith(".json"):
        raise InvalidInputError("model", f"{name!r} is neither a folder nor a config.json")
    return catalogue.model(name)


def find_hardware(name: str) -> HardwareSpec:
    """A machine by its catalogue name, or from a hardware file."""
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return HardwareSpec.load(path)
    return catalogue.hardware(name)


def find_workload(
    name: str | Workload | None,
    trace: str | None,
    prompt: int | None,
    generate: int | None,
    requests: int | None,
) -> Workload:
    """A workload by name or trace, or of uniform lengths; single numbers given beside a name win
    over the named workload's."""
    if name is not None and trace is not None:
        raise InvalidInputError("trace", "give either a workload's name or a trace")
    if trace is not None:
        return _changed(Workload.from_trace(trace), prompt, generate, requests)
    if name is not None:
        base = name if isinstance(name, Workload) else workload.named(name)
        return _changed(base, prompt, generate, requests)
    if prompt is None or generate is None:
        missing = "prompt" if prompt is None else "generate"
        raise InvalidInputError(missing, "missing; give --prompt and --generate, or --workload")
    return Workload.uniform(prompt, generate, 20_000 if requests is None else requests)


def _changed(
    base: Workload, prompt: int | None, generate: int | None, requests: int | None
) -> Workload:
    if base.trace and (prompt is not None or generate is not None):
        raise InvalidInputError("prompt", "a trace has its own lengths")
    if prompt is not None:
        base = replace(base, prompt_tokens=prompt, max_prompt_tokens=None, distribution="uniform")
    if generate is not None:
        base = replace(base, generated_tokens=generate)
    return base if requests is None else base.with_requests(requests)


def _fill_host(model: ModelSpec, hardware: HardwareSpec, step_tokens: int) -> float:
    left = default_kv_bytes(model, hardware, step_tokens)
    if left is None:
        problem = f"missing, and {hardware.name} does not say how much host memory it has"
        raise InvalidInputError("kv", problem)
    if left <= 0:
        total = format_bytes_both(hardware.require("host_memory_bytes"))
        problem = (
            f"{hardware.name} has {total}, which does not hold the weights of {model.name}"
            f" ({format_bytes_both(model.weights_bytes)}) and what runs beside them"
        )
        raise InvalidInputError("host memory", problem)
    return left
