"""What systems that separate prefill from decode do on the same machine.

Two of them: MoE-Lightning (hierarchical roofline model with its policy search, arXiv 2411.11217)
and FlexGen (zig-zag block schedule, arXiv 2303.06865). Both take a batch of N sequences through
prefill, then through g decode passes, and start the next batch when the whole of this one is done.

Each is asked twice. `claimed` puts peak rates and all memory into the system's own model, as its
policy search does. `expected` puts in what such systems were seen to reach, by the constants
below, which are the same for every machine and workload.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from planner.hardware import HardwareSpec
from planner.spec import ModelSpec
from planner.workload import Workload

#: Share of GPU and host memory that a policy may fill (alpha_g, alpha_c in FlexGen's cost model).
USABLE_MEMORY_SHARE = 0.8
#: Share of its peak that a processor reaches in large GEMMs: FlexGen's calibration of a T4, 21.24
#: of 65 TFLOP/s.
GEMM_EFFICIENCY = 0.33
#: The same for decode, whose GEMMs are small: 4.3 of 65 TFLOP/s.
DECODE_EFFICIENCY = 0.066
#: How much slower their CPU attention is than a kernel that streams KV (MoE-Lens: 3.1 with all
#: threads).
ATTENTION_SLOWDOWN = 3.1
_ACTIVATION_BYTES = 2
_SHAPE_SAMPLE = 2000
_BATCH_STEP = 1.15


@dataclass(frozen=True)
class Policy:
    """(N, mu, A_g, F_g, r_w, r_c) of MoE-Lightning; FlexGen's block in the same terms."""

    batch_sequences: int
    micro_batch_sequences: int
    attention_on_gpu: bool
    ffn_on_gpu: bool
    gpu_weight_share: float
    gpu_kv_share: float


@dataclass(frozen=True)
class BaselineEstimate:
    """One system on one machine. Throughput counts prefill and decode time of a batch."""

    system: str
    policy: Policy
    prefill_s: float
    decode_pass_s: float
    decode_limit: str
    generated_tokens_per_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Rates:
    """What the machine gives a baseline; all GPUs taken together."""

    prefill_flops_per_s: float
    decode_flops_per_s: float
    gpu_bytes_per_s: float
    link_bytes_per_s: float
    link_back_bytes_per_s: float
    cpu_flops_per_s: float
    host_bytes_per_s: float
    attention_bytes_per_s: float
    gpu_bytes: float
    host_bytes: float

    @staticmethod
    def claimed(hardware: HardwareSpec) -> "Rates":
        """Peak rates and all memory. InvalidInputError names a quantity that is not known."""
        machine = hardware.combined()
        peak, host = machine.require("gpu_flops_per_s"), machine.require("host_read_bytes_per_s")
        return Rates(
            prefill_flops_per_s=peak,
            decode_flops_per_s=peak,
            gpu_bytes_per_s=machine.require("gpu_memory_bytes_per_s"),
            link_bytes_per_s=machine.require("link_h2d_bytes_per_s"),
            link_back_bytes_per_s=machine.require("link_d2h_bytes_per_s"),
            cpu_flops_per_s=machine.require("cpu_flops_per_s"),
            host_bytes_per_s=host,
            attention_bytes_per_s=host,
            gpu_bytes=machine.require("gpu_memory_bytes"),
            host_bytes=machine.require("host_memory_bytes"),
        )

    def expected(self) -> "Rates":
        """The rates that such systems were seen to reach where these are the claimed ones."""
        return replace(
            self,
            prefill_flops_per_s=self.prefill_flops_per_s * GEMM_EFFICIENCY,
            decode_flops_per_s=self.decode_flops_per_s * DECODE_EFFICIENCY,
            cpu_flops_per_s=self.cpu_flops_per_s * GEMM_EFFICIENCY,
            attention_bytes_per_s=self.attention_bytes_per_s / ATTENTION_SLOWDOWN,
            gpu_bytes=self.gpu_bytes * USABLE_MEMORY_SHARE,
            host_bytes=self.host_bytes * USABLE_MEMORY_SHARE,
        )


@dataclass(frozen=True)
class Shape:
    """A request as a baseline holds it, padded or not; `prompt_square_tokens2` is the mean of the
    squared prompt length, which attention scores grow with."""

    prompt_tokens: float
    prompt_square_tokens2: float
    generated_tokens: float

    @staticmethod
    def of(workload: Workload, padded: bool) -> "Shape":
        sample = workload.with_requests(min(workload.n_requests, _SHAPE_SAMPLE))
        prompts = [item.prompt_tokens for item in sample.lengths()]
        if padded:
            prompts = [max(prompts)]
        mean = math.fsum(prompts) / len(prompts)
        square = math.fsum(p * p for p in prompts) / len(prompts)
        return Shape(mean, square, workload.generated_tokens)

    @property
    def mean_context_tokens(self) -> float:
        return self.prompt_tokens + self.generated_tokens / 2

    @property
    def final_tokens(self) -> float:
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True)
class Case:
    """Everything that a policy's cost depends on, per layer where the name says so."""

    model: ModelSpec
    rates: Rates
    shape: Shape
    whole_batch_in_prefill: bool
    transfers_in_turn: bool

    @cached_property
    def layer_bytes(self) -> float:
        return self.model.streamed_bytes_per_pass / self.model.n_layers

    @cached_property
    def layer_flops_per_token(self) -> float:
        return self.model.layers_gemm_flops_per_token / self.model.n_layers

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token

    @cached_property
    def layer_kv_bytes_per_token(self) -> float:
        return self.kv_bytes_per_token / self.model.n_layers

    @cached_property
    def attention_flops_per_token(self) -> float:
        """Of one layer, per token of context."""
        return self.model.attention.flops(1.0)


def moe_lightning(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    claimed: bool = False,
    padded: bool = False,
) -> BaselineEstimate | None:
    """The best policy of MoE-Lightning's search, or None where not even one sequence fits."""
    rates = Rates.claimed(hardware)
    case = Case(
        model=model,
        rates=rates if claimed else rates.expected(),
        shape=Shape.of(workload, padded),
        whole_batch_in_prefill=not claimed,
        transfers_in_turn=False,
    )
    name = "moe-lightning-padded" if padded else "moe-lightning"
    return _search(name, case, workload, attention_on_gpu=(False, True), ffn_on_gpu=(True, False))


def flexgen(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    claimed: bool = False,
) -> BaselineEstimate | None:
    """FlexGen's best block, or None where not even one sequence fits. Prompts are padded to the
    longest; attention is on the GPU, with the cache moved there, and the FFN always is."""
    rates = Rates.claimed(hardware)
    case = Case(
        model=model,
        rates=rates if claimed else rates.expected(),
        shape=Shape.of(workload, padded=True),
        whole_batch_in_prefill=not claimed,
        transfers_in_turn=not claimed,
    )
    return _search("flexgen", case, workload, attention_on_gpu=(True,), ffn_on_gpu=(True,))


def _search(
    system: str,
    case: Case,
    workload: Workload,
    attention_on_gpu: tuple[bool, ...],
    ffn_on_gpu: tuple[bool, ...],
) -> BaselineEstimate | None:
    """The policy of the highest throughput among those that fit, over N, mu, A_g and F_g; the
    shares r_w and r_c follow, since every byte kept on the GPU saves its transfer."""
    best: BaselineEstimate | None = None
    for attention, ffn in product(attention_on_gpu, ffn_on_gpu):
        for n, micro in _batches(case, workload.n_requests):
            policy = _fill_gpu(case, Policy(n, micro, attention, ffn, 0.0, 0.0))
            if policy is None:
                continue
            estimate = _estimate(system, case, policy)
            if best is None or estimate.generated_tokens_per_s > best.generated_tokens_per_s:
                best = estimate
    return best


def _batches(case: Case, n_requests: int) -> Iterator[tuple[int, int]]:
    """(N, mu): N up to what host memory holds, geometrically; mu the powers of two below it."""
    largest = min(_host_sequences(case), n_requests)
    n = float(largest)
    while n >= 1:
        micro = 1
        while micro < n:
            yield math.floor(n), micro
            micro *= 2
        yield math.floor(n), math.floor(n)
        n /= _BATCH_STEP


def _host_sequences(case: Case) -> int:
    """Sequences whose KV fits beside all weights in host memory."""
    free_bytes = case.rates.host_bytes - case.model.weights_bytes
    each_bytes = case.shape.final_tokens * case.kv_bytes_per_token
    return max(0, math.floor(free_bytes / each_bytes))


def _fill_gpu(case: Case, policy: Policy) -> Policy | None:
    """The policy with what is left of GPU memory given to weights, then to KV that the GPU would
    else fetch; None where its working set does not fit."""
    spare_bytes = case.rates.gpu_bytes - _gpu_working_bytes(case, policy)
    if spare_bytes < 0:
        return None
    if not policy.ffn_on_gpu:
        return policy
    # A resident layer needs no place in the buffer of two; while few are, the buffer stays.
    streamed = case.model.streamed_bytes_per_pass
    weight_share = min(1.0, spare_bytes / streamed)
    kv_share = 0.0
    if policy.attention_on_gpu:
        kv_bytes = policy.batch_sequences * case.shape.final_tokens * case.kv_bytes_per_token
        kv_share = min(1.0, (spare_bytes - weight_share * streamed) / kv_bytes)
    return Policy(
        policy.batch_sequences,
        policy.micro_batch_sequences,
        policy.attention_on_gpu,
        policy.ffn_on_gpu,
        weight_share,
        kv_share,
    )


def _gpu_working_bytes(case: Case, policy: Policy) -> float:
    """GPU memory before anything is resident: a buffer of two layers, embedding and head,
    activations of prefill, and KV of the micro-batches being attended."""
    model, shape = case.model, case.shape
    buffers = 2 * case.layer_bytes if policy.ffn_on_gpu else 0.0
    hidden = _ACTIVATION_BYTES * model.hidden_size * shape.prompt_tokens
    scores = 4 * model.n_q_heads * shape.prompt_square_tokens2  # FP32, one layer at a time
    at_once = (
        policy.batch_sequences if case.whole_batch_in_prefill else policy.micro_batch_sequences
    )
    held = policy.batch_sequences * hidden + at_once * scores
    kv = 0.0
    if policy.attention_on_gpu:
        tokens = policy.micro_batch_sequences * shape.final_tokens
        kv = 2 * tokens * case.layer_kv_bytes_per_token
    return buffers + model.resident_bytes + held + kv


def _estimate(system: str, case: Case, policy: Policy) -> BaselineEstimate:
    parts = decode_layer_parts_s(case, policy)
    if case.transfers_in_turn:
        layer_s = parts["link"] + max(v for name, v in parts.items() if name != "link")
    else:
        layer_s = max(parts.values())
    prefill_s = case.model.n_layers * prefill_layer_s(case, policy)
    pass_s = case.model.n_layers * layer_s
    batch_s = prefill_s + case.shape.generated_tokens * pass_s
    generated = policy.batch_sequences * case.shape.generated_tokens
    return BaselineEstimate(
        system=system,
        policy=policy,
        prefill_s=prefill_s,
        decode_pass_s=pass_s,
        decode_limit=max(parts, key=lambda name: parts[name]),
        generated_tokens_per_s=generated / batch_s,
        tokens_per_s=policy.batch_sequences * case.shape.final_tokens / batch_s,
    )


def prefill_layer_s(case: Case, policy: Policy) -> float:
    """One layer over all prompts: the largest of weight transfer, GPU time and KV moved out."""
    n, rates = policy.batch_sequences, case.rates
    weights_s = (1 - policy.gpu_weight_share) * case.layer_bytes / rates.link_bytes_per_s
    tokens = n * case.shape.prompt_tokens
    attention = n * case.attention_flops_per_token * case.shape.prompt_square_tokens2 / 2
    gpu_s = (tokens * case.layer_flops_per_token + attention) / rates.prefill_flops_per_s
    kv_bytes = tokens * case.layer_kv_bytes_per_token * (1 - policy.gpu_kv_share)
    return max(weights_s, gpu_s, kv_bytes / rates.link_back_bytes_per_s)


def decode_layer_parts_s(case: Case, policy: Policy) -> dict[str, float]:
    """Seconds of one layer of a decode pass on each resource, at the mean context (HRM: every
    operator at the lower of its compute and its bandwidth roof)."""
    n, rates, model = policy.batch_sequences, case.rates, case.model
    kv_bytes = n * case.shape.mean_context_tokens * case.layer_kv_bytes_per_token
    attention_flops = n * case.attention_flops_per_token * case.shape.mean_context_tokens
    to_gpu = float(n * model.attention_output_elements * _ACTIVATION_BYTES)
    to_host = float(n * model.attention_input_elements * _ACTIVATION_BYTES)
    cpu_s = gpu_s = 0.0
    if policy.attention_on_gpu:
        to_gpu, to_host = kv_bytes * (1 - policy.gpu_kv_share), n * case.layer_kv_bytes_per_token
        gpu_s += kv_bytes / rates.gpu_bytes_per_s
    else:
        cpu_s += max(
            kv_bytes / rates.attention_bytes_per_s, attention_flops / rates.cpu_flops_per_s
        )
    gemm_flops = n * case.layer_flops_per_token
    if policy.ffn_on_gpu:
        to_gpu += (1 - policy.gpu_weight_share) * case.layer_bytes
        reads = math.ceil(n / policy.micro_batch_sequences) * case.layer_bytes
        gpu_s += max(gemm_flops / rates.decode_flops_per_s, reads / rates.gpu_bytes_per_s)
    else:
        cpu_s += max(case.layer_bytes / rates.host_bytes_per_s, gemm_flops / rates.cpu_flops_per_s)
    return {
        "link": to_gpu / rates.link_bytes_per_s,
        "link back": to_host / rates.link_back_bytes_per_s,
        "cpu": cpu_s,
        "gpu": gpu_s,
    }
