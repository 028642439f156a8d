"""What one iteration (one pass over all layers) costs, and which resource limits it.

Pure functions of a step's counts. The terms are those of the iteration-level model (MoE-Lens,
arXiv 2504.09345, extended); each docstring is its formula in words.
"""

import enum
from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

from planner.errors import InvalidInputError
from planner.hardware import HardwareSpec
from planner.scheduler import Step
from planner.spec import ModelSpec

#: Layers of weights that device memory holds beside the resident ones: as far as the link works
#: ahead while nothing is computed.
BUFFERED_LAYERS = 2


class ExecutionMode(enum.Enum):
    """Which of link, device and CPU attention work at the same time."""

    PIPELINED = "pipelined"  # all three: the paper's VSLPipe
    SHARED_CORES = "shared_cores"  # device and attention take turns; the link works beside them
    SEQUENTIAL = "sequential"  # one after the other


@dataclass(frozen=True)
class PiecewiseLine:
    """Seconds as a function of a count: straight between points, and on beyond the last two."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        xs = [x for x, _ in self.points]
        if len(xs) < 2 or any(a >= b for a, b in pairwise(xs)):
            raise InvalidInputError("points", "must be at least two, with ascending counts")

    @staticmethod
    def affine(fixed_s: float, per_unit_s: float) -> "PiecewiseLine":
        """fixed_s + per_unit_s · x."""
        return PiecewiseLine(((0.0, fixed_s), (1.0, fixed_s + per_unit_s)))

    @staticmethod
    def roofline(floor_s: float, per_unit_s: float) -> "PiecewiseLine":
        """max(floor_s, per_unit_s · x)."""
        if floor_s <= 0 or per_unit_s <= 0:
            return PiecewiseLine.affine(max(floor_s, 0.0), per_unit_s)
        knee = floor_s / per_unit_s
        return PiecewiseLine(((0.0, floor_s), (knee, floor_s), (2 * knee, 2 * floor_s)))

    def at(self, count: float) -> float:
        """Seconds for `count`, never negative."""
        index = bisect_right(self.points, (count, float("inf")), 1, len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[index - 1], self.points[index]
        return max(0.0, y0 + (y1 - y0) * (count - x0) / (x1 - x0))


class StepLoad(NamedTuple):
    """The counts of a step that its duration depends on.

    A pair is a query token and a KV token that it attends to. Pairs within a prefill chunk and
    pairs with KV from before the chunk are apart, because devices may compute them apart.
    """

    tokens: float = 0.0
    sampled_tokens: float = 0.0
    sequences: float = 0.0
    decode_sequences: float = 0.0
    decode_kv_tokens: float = 0.0
    prefill_own_pairs: float = 0.0
    prefill_earlier_pairs: float = 0.0

    @staticmethod
    def of(step: Step) -> "StepLoad":
        """The load of a planned step."""
        chunks = step.chunks
        decodes = step.decode_count
        kv_tokens = decodes + sum([chunk[1] for chunk in islice(chunks, decodes)])
        tokens = sampled = decodes
        own_pairs = earlier_pairs = 0
        for chunk in islice(chunks, decodes, None):
            count = chunk.token_count
            tokens += count
            sampled += chunk.samples
            own_pairs += count * (count + 1) // 2
            earlier_pairs += count * chunk.start_position
        return StepLoad(tokens, sampled, len(chunks), decodes, kv_tokens, own_pairs, earlier_pairs)

    def scaled(self, factor: float) -> "StepLoad":
        """The load of a machine `factor` times as large that runs `factor` times the requests."""
        return StepLoad(*(value * factor for value in self))


class IterationTime(NamedTuple):
    """Seconds of one iteration. The five resources are busy times over all layers; `layers_s` is
    what the layers take together, which is less than their sum where they overlap. Of head and
    overhead `hidden_s` is hidden: meanwhile the link works ahead on the next pass."""

    h2d_s: float
    d2h_s: float
    device_s: float
    attention_s: float
    host_memory_s: float
    layers_s: float
    head_s: float
    overhead_s: float
    hidden_s: float
    limit: str  # "link", "link_d2h", "device", "attention", "host_memory", "head" or "overhead"

    @property
    def total_s(self) -> float:
        return self.layers_s + self.head_s + self.overhead_s - self.hidden_s


@dataclass(frozen=True)
class IterationCosts:
    """Cost terms of one model on one machine. A rate of None is not known: its term is left out.

    Per layer: `layer_bytes` W_l, of which `resident_share` r is not streamed; `device_time` G in
    tokens, without attention; KV and activation bytes per token. `n_groups` is 2 where a step is
    split into α and β. Activations go to the host as q, k, v and come back as attention's output.
    `device_slowdown` is κ's counterpart: extra device and attention seconds for each second that
    the link copies (an emulated link takes its copies' time from the same cores).
    """

    n_layers: int
    layer_bytes: float
    device_time: PiecewiseLine
    mode: ExecutionMode = ExecutionMode.PIPELINED
    n_groups: int = 2
    resident_share: float = 0.0
    link_h2d_bytes_per_s: float | None = None
    link_d2h_bytes_per_s: float | None = None
    link_slowdown: float = 0.0
    device_slowdown: float = 0.0
    to_host_bytes_per_token: float = 0.0
    to_device_bytes_per_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    windowed_share: float = 0.0
    window_tokens: float = float("inf")
    attention_bytes_per_s: float | None = None
    attention_fixed_s: float = 0.0
    attention_sequence_s: float = 0.0
    attention_pair_s: float = 0.0
    prefill_on_cpu: bool = False
    device_pair_s: float = 0.0
    host_read_bytes_per_s: float | None = None
    head_fixed_s: float = 0.0
    head_token_s: float = 0.0
    overhead_fixed_s: float = 0.0
    overhead_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if self.n_layers < 1:
            raise InvalidInputError("n_layers", f"must be at least 1, is {self.n_layers}")
        if self.n_groups not in (1, 2):
            raise InvalidInputError("n_groups", f"must be 1 or 2, is {self.n_groups}")
        if not 0 <= self.link_slowdown < 1:
            raise InvalidInputError("link_slowdown", f"must be in [0, 1), is {self.link_slowdown}")
        if not 0 <= self.resident_share <= 1:
            raise InvalidInputError("resident_share", f"must be in 0 … 1, is {self.resident_share}")

    @staticmethod
    def constant(step_s: float) -> "IterationCosts":
        """Every iteration takes `step_s`, limited by the link: the machine of Stage 2."""
        flat = PiecewiseLine.affine(0.0, 0.0)
        return IterationCosts(1, step_s, flat, link_h2d_bytes_per_s=1.0)

    @staticmethod
    def from_specs(
        model: ModelSpec,
        hardware: HardwareSpec,
        *,
        resident_share: float = 0.0,
        mode: ExecutionMode = ExecutionMode.PIPELINED,
        prefill_on_cpu: bool = False,
    ) -> "IterationCosts":
        """Terms from what the specifications know.

        Measured times of a layer (device_time_*) are used when they were taken with this model;
        otherwise the layer's FLOPs at the sustained rate, or the peak, over the device's reads of
        its own memory. All GPUs count as one. Raises InvalidInputError where no device rate is
        known.
        """
        machine = hardware.combined()
        activation_bytes = 2  # BF16, the wire format between device and host
        windows = [layer.window_tokens for layer in model.layers if layer.window_tokens is not None]
        return IterationCosts(
            n_layers=model.n_layers,
            layer_bytes=model.streamed_bytes_per_pass / model.n_layers,
            device_time=_device_time(model, machine),
            mode=mode,
            n_groups=2 if _splits(mode, machine) else 1,
            resident_share=resident_share,
            link_h2d_bytes_per_s=machine.value("link_h2d_bytes_per_s"),
            link_d2h_bytes_per_s=machine.value("link_d2h_bytes_per_s"),
            link_slowdown=machine.value("link_slowdown") or 0.0,
            to_host_bytes_per_token=activation_bytes * model.attention_input_elements,
            to_device_bytes_per_token=activation_bytes * model.attention_output_elements,
            kv_bytes_per_token=model.kv_bytes_per_token_per_layer,
            windowed_share=len(windows) / model.n_layers,
            window_tokens=max(windows, default=float("inf")),
            attention_bytes_per_s=machine.value("attention_bytes_per_s"),
            attention_fixed_s=machine.value("attention_fixed_s") or 0.0,
            attention_sequence_s=machine.value("attention_sequence_s") or 0.0,
            attention_pair_s=_attention_pair_s(model, machine),
            prefill_on_cpu=prefill_on_cpu,
            device_pair_s=model.attention.flops(1.0) / _device_flops_per_s(machine, model),
            host_read_bytes_per_s=machine.value("host_read_bytes_per_s"),
            head_fixed_s=machine.value("head_fixed_s") or 0.0,
            head_token_s=_head_token_s(model, machine),
            overhead_fixed_s=machine.value("step_overhead_s") or 0.0,
            overhead_sequence_s=machine.value("step_overhead_sequence_s") or 0.0,
        )

    def iteration(self, load: StepLoad) -> IterationTime:
        """Seconds of one iteration and what limits it. Zero tokens cost nothing but overhead."""
        groups = self.n_groups if load.tokens >= self.n_groups else 1
        device_s = self._device_s(load, groups)
        attention_s = self._attention_s(load, groups)
        stream_s = self._h2d_s(load)
        compute_s = device_s + attention_s
        if self.device_slowdown and compute_s > 0:
            grown = 1 + self.device_slowdown * min(stream_s, compute_s) / compute_s
            device_s, attention_s = device_s * grown, attention_s * grown
        parts = {
            "link": self._slowed_s(stream_s, attention_s),
            "link_d2h": self._d2h_s(load),
            "device": device_s,
            "attention": attention_s,
            "host_memory": self._host_memory_s(load),
        }
        layers_s, slack_s, limit = self._layers(parts, groups)
        head_s = self.head_fixed_s + self.head_token_s * load.sampled_tokens if load.tokens else 0.0
        overhead_s = self.overhead_fixed_s + self.overhead_sequence_s * load.sequences
        ahead_s = BUFFERED_LAYERS * self._streamed_s
        hidden_s = min(head_s + overhead_s, slack_s, ahead_s)
        rest_s, rest = max((head_s, "head"), (overhead_s, "overhead"))
        return IterationTime(
            h2d_s=self.n_layers * parts["link"],
            d2h_s=self.n_layers * parts["link_d2h"],
            device_s=self.n_layers * device_s,
            attention_s=self.n_layers * attention_s,
            host_memory_s=self.n_layers * parts["host_memory"],
            layers_s=layers_s,
            head_s=head_s,
            overhead_s=overhead_s,
            hidden_s=hidden_s,
            limit=rest if rest_s > layers_s else limit,
        )

    def _layers(self, parts: dict[str, float], groups: int) -> tuple[float, float, str]:
        """L · stage + prologue; how much of it nothing is computed; and the busiest resource.

        Pipelined: stage = max(h2d, d2h, max(C, G), host memory) for groups of equal cost; the
        prologue fills the pipeline with the shorter half of one group, where the link leaves no
        time for it anyway.
        """
        limit = max(parts, key=lambda name: parts[name])
        device_s, attention_s = parts["device"], parts["attention"]
        transfers_s = max(parts["link"], parts["link_d2h"], parts["host_memory"])
        if self.mode is ExecutionMode.SEQUENTIAL:
            copies_s = parts["link"] + parts["link_d2h"]
            return self.n_layers * max(device_s + attention_s + copies_s, transfers_s), 0.0, limit
        if self.mode is ExecutionMode.PIPELINED and groups > 1:
            fill_s = min(device_s, attention_s) / groups
            compute_s = self.n_layers * max(device_s, attention_s) + fill_s
        else:
            compute_s = self.n_layers * (device_s + attention_s)
            if compute_s > self.n_layers * transfers_s:
                limit = "device" if device_s >= attention_s else "attention"
        layers_s = max(compute_s, self.n_layers * transfers_s)
        return layers_s, layers_s - compute_s, limit

    def _device_s(self, load: StepLoad, groups: int) -> float:
        """G summed over the groups, each with its share of the tokens, and prefill attention."""
        if load.tokens == 0:
            return 0.0
        pairs = 0.0 if self.prefill_on_cpu else load.prefill_own_pairs
        return groups * self.device_time.at(load.tokens / groups) + self.device_pair_s * pairs

    def _attention_s(self, load: StepLoad, groups: int) -> float:
        """C = KV bytes / B_attn + c0 · sequences + pairs of prefill that the CPU computes."""
        pairs = load.prefill_earlier_pairs
        if self.prefill_on_cpu:
            pairs += load.prefill_own_pairs
        seconds = self.attention_sequence_s * load.decode_sequences + self.attention_pair_s * pairs
        if self.attention_bytes_per_s is not None:
            seconds += self._kv_read_bytes(load) / self.attention_bytes_per_s
        busy = load.decode_sequences > 0 or pairs > 0
        return seconds + (groups * self.attention_fixed_s if busy else 0.0)

    def _kv_read_bytes(self, load: StepLoad) -> float:
        """KV that decode reads in one layer; windowed layers read up to the window of the mean."""
        tokens = load.decode_kv_tokens
        if self.windowed_share:
            seen = min(tokens, self.window_tokens * load.decode_sequences)
            tokens = (1 - self.windowed_share) * tokens + self.windowed_share * seen
        return tokens * self.kv_bytes_per_token

    @property
    def _streamed_bytes(self) -> float:
        return self.layer_bytes * (1 - self.resident_share)

    @property
    def _streamed_s(self) -> float:
        """Of a layer's weights over the link."""
        rate = self.link_h2d_bytes_per_s
        return self._streamed_bytes / rate if rate else 0.0

    def _h2d_s(self, load: StepLoad) -> float:
        """(W_l (1-r) + n · attention output) / B_IO."""
        if self.link_h2d_bytes_per_s is None:
            return 0.0
        activations = load.tokens * self.to_device_bytes_per_token
        return (self._streamed_bytes + activations) / self.link_h2d_bytes_per_s

    def _slowed_s(self, stream_s: float, attention_s: float) -> float:
        """h2d + κ · t_c: attention leaves 1 - κ of the link's rate while both run.

        A transfer that ends before the attention does takes h2d / (1 - κ), which caps the term.
        """
        slowed_s = stream_s / (1 - self.link_slowdown)
        return min(stream_s + self.link_slowdown * attention_s, slowed_s)

    def _d2h_s(self, load: StepLoad) -> float:
        """n · (q, k and v of a token) / B_IO of that direction."""
        if self.link_d2h_bytes_per_s is None:
            return 0.0
        return load.tokens * self.to_host_bytes_per_token / self.link_d2h_bytes_per_s

    def _host_memory_s(self, load: StepLoad) -> float:
        """(W_l (1-r) + KV bytes) / B_mem: both are read from the same memory."""
        if self.host_read_bytes_per_s is None:
            return 0.0
        streamed = self._streamed_bytes if self.link_h2d_bytes_per_s is not None else 0.0
        return (streamed + self._kv_read_bytes(load)) / self.host_read_bytes_per_s


def _splits(mode: ExecutionMode, machine: HardwareSpec) -> bool:
    """Whether a step is split into α and β: so that the link works beside the rest."""
    if mode is ExecutionMode.SHARED_CORES:
        return machine.link_h2d_bytes_per_s is not None
    return mode is ExecutionMode.PIPELINED


def _device_flops_per_s(machine: HardwareSpec, model: ModelSpec) -> float:
    sustained = machine.value("gpu_sustained_flops_per_s") or machine.value("gpu_flops_per_s")
    if sustained:
        return sustained
    per_token_s = machine.value("device_time_per_token_s")
    if per_token_s:
        return model.layers_gemm_flops_per_token / model.n_layers / per_token_s
    raise InvalidInputError(
        "hardware.gpu_sustained_flops_per_s", f"not given for {machine.name}, nor the peak"
    )


def _device_time(model: ModelSpec, machine: HardwareSpec) -> PiecewiseLine:
    """G of one layer: measured, else its FLOPs, but at least one read of its weights."""
    if machine.device_time_curve is not None and _profiled(model, machine):
        return PiecewiseLine(machine.device_time_curve.points)
    fixed_s = machine.value("device_time_fixed_s")
    per_token_s = machine.value("device_time_per_token_s")
    if fixed_s is not None and per_token_s is not None and _profiled(model, machine):
        return PiecewiseLine.affine(fixed_s, per_token_s)
    flops = model.layers_gemm_flops_per_token / model.n_layers
    read_bytes_per_s = machine.value("gpu_memory_bytes_per_s")
    layer_bytes = model.streamed_bytes_per_pass / model.n_layers
    floor_s = layer_bytes / read_bytes_per_s if read_bytes_per_s else 0.0
    return PiecewiseLine.roofline(floor_s, flops / _device_flops_per_s(machine, model))


def _profiled(model: ModelSpec, machine: HardwareSpec) -> bool:
    return machine.profiled_model in ("", model.name)


def _attention_pair_s(model: ModelSpec, machine: HardwareSpec) -> float:
    """Seconds of the CPU for one pair: measured, else its FLOPs, else left out."""
    measured_s = machine.value("attention_pair_s")
    if measured_s is not None and _profiled(model, machine):
        return measured_s
    flops_per_s = machine.value("cpu_flops_per_s")
    return model.attention.flops(1.0) / flops_per_s if flops_per_s else 0.0


def _head_token_s(model: ModelSpec, machine: HardwareSpec) -> float:
    measured_s = machine.value("head_token_s")
    if measured_s is not None and _profiled(model, machine):
        return measured_s
    return model.head_flops_per_token / _device_flops_per_s(machine, model)
