"""Stage 1: the upper bound on throughput (Eqs 1-7 of MoE-Lens, arXiv 2504.09345).

Pure functions over plain numbers in SI base units. Symbols: p prompt tokens, g generated tokens,
M KV capacity in tokens, delta the seconds that streaming all weights once takes.
"""

import math
from dataclasses import dataclass

from planner.errors import InvalidInputError


@dataclass(frozen=True)
class Stage1:
    """The bound and what makes it. Rates are tokens per second, prompt and generated together.

    `kv_tokens_per_s` is None where nothing is streamed (no pass has a least duration then) and
    `gpu_tokens_per_s` where the device's rate is not known; `tokens_per_s` is the least of those
    that are known and `limit` names it: "kv_capacity" or "gpu".
    """

    pme: float
    stream_s: float
    kv_tokens_per_s: float | None
    gpu_tokens_per_s: float | None
    tokens_per_s: float
    generated_tokens_per_s: float
    limit: str


def stage1(
    prompt_tokens: float,
    generated_tokens: float,
    kv_capacity_tokens: float,
    stream_s: float,
    gpu_tokens_per_s: float | None,
) -> Stage1:
    """Eq 4: T_max = min(PME · M / delta, T_GPU).

    Raises InvalidInputError when a length is below 1, the KV holds not one sequence, or neither
    bound is known.
    """
    check_lengths(prompt_tokens, generated_tokens)
    check_capacity(prompt_tokens, generated_tokens, kv_capacity_tokens)
    pme = parallelism_memory_efficiency(prompt_tokens, generated_tokens)
    kv_rate = pme * kv_capacity_tokens / stream_s if stream_s > 0 else None
    bounds = {"kv_capacity": kv_rate, "gpu": gpu_tokens_per_s}
    known = {name: rate for name, rate in bounds.items() if rate is not None}
    if not known:
        raise InvalidInputError("gpu_tokens_per_s", "not known, and no weights are streamed")
    limit = min(known, key=lambda name: known[name])
    rate = known[limit]
    generated = generated_share(rate, prompt_tokens, generated_tokens)
    return Stage1(pme, stream_s, kv_rate, gpu_tokens_per_s, rate, generated, limit)


def parallelism_memory_efficiency(prompt_tokens: float, generated_tokens: float) -> float:
    """Eq 3: tokens processed per token of KV held for one pass, 2(p+g) / ((2p+g)·g).

    The sum of the KV over a sequence's passes is taken as g(2p+g)/2, as the paper does; counted
    for j = 1 … g it is g(2p+g+1)/2.
    """
    p, g = prompt_tokens, generated_tokens
    return 2 * (p + g) / ((2 * p + g) * g)


def stream_seconds(streamed_bytes: float, link_h2d_bytes_per_s: float) -> float:
    """delta = W / B_IO: seconds to move the weights of one pass to the device."""
    return streamed_bytes / link_h2d_bytes_per_s


def gpu_tokens_per_second(gpu_sustained_flops_per_s: float, active_parameters: float) -> float:
    """T_GPU = C_eff / (2 · active parameters)."""
    return gpu_sustained_flops_per_s / (2 * active_parameters)


def gemm_intensity(
    tokens: float,
    experts: int,
    experts_per_token: int,
    expert_width_ratio: float,
    query_heads_per_kv_head: float,
) -> float:
    """Eq 1 as printed: FLOP per byte of weights of a pass of n tokens, m = h_i / h.

    I = n · (6·m·N_k + 2 + 2/s) / (6·m·N_e + 2 + 2/s), about n · N_k / N_e.
    """
    projections = 2 + 2 / query_heads_per_kv_head
    routed = 6 * expert_width_ratio
    active = routed * experts_per_token + projections
    return tokens * active / (routed * experts + projections)


def saturation_tokens(
    gpu_flops_per_s: float, link_h2d_bytes_per_s: float, experts: int, experts_per_token: int
) -> float:
    """Eq 2: tokens per pass from which the device, not the link, is the limit."""
    return gpu_flops_per_s / link_h2d_bytes_per_s * experts / experts_per_token


@dataclass(frozen=True)
class SaturationRow:
    """A row of the paper's Table 2, in its own units and digits."""

    kilotokens: float
    kv_gigabytes_256: int
    kv_gigabytes_512: int


def saturation_row(
    gpu_teraflops: float,
    link_gigabytes_per_s: float = 32,
    experts: int = 8,
    experts_per_token: int = 2,
    kv_mebibytes_256: float = 32,
) -> SaturationRow:
    """Table 2 with the paper's unit convention, which nothing else here uses.

    1 T is 1024 G; tokens are rounded up to the next hundred; each token is a sequence whose KV at
    256 tokens (32 MiB for Mixtral-8x7B) is counted in MB, 1000 of which make a GB, rounded down;
    the KV at 512 tokens is twice that figure.
    """
    tokens = saturation_tokens(
        gpu_teraflops * 1024, link_gigabytes_per_s, experts, experts_per_token
    )
    kv_gigabytes = math.floor(tokens * kv_mebibytes_256 / 1000)
    return SaturationRow(math.ceil(tokens / 100) / 10, kv_gigabytes, 2 * kv_gigabytes)


def kv_read_bytes_per_second(kv_bytes: float, stream_s: float) -> float:
    """B_KV = M_bytes / delta: KV that is read when all of it is, once per pass."""
    return kv_bytes / stream_s


def host_bytes_per_second_needed(
    kv_bytes: float, stream_s: float, link_h2d_bytes_per_s: float
) -> float:
    """Eq 5: B_mem ≥ B_KV + B_IO, host memory reads for the link and the KV together."""
    return kv_read_bytes_per_second(kv_bytes, stream_s) + link_h2d_bytes_per_s


def cpu_attention_flops_per_second_needed(
    kv_bytes: float, stream_s: float, flops_per_kv_byte: float
) -> float:
    """Eq 6: C_CPU ≥ s · B_KV; `flops_per_kv_byte` is s for grouped-query attention over BF16."""
    return flops_per_kv_byte * kv_read_bytes_per_second(kv_bytes, stream_s)


def overlapped_kv_gain(prompt_tokens: float, generated_tokens: float) -> float:
    """Eq 7: how much more the same KV holds when prefill and decode overlap.

    A sequence holds p + g/2 on average instead of p + g.
    """
    return (prompt_tokens + generated_tokens) / (prompt_tokens + generated_tokens / 2)


def generated_share(tokens_per_s: float, prompt_tokens: float, generated_tokens: float) -> float:
    """The generated part of a rate that counts prompt and generated tokens."""
    return tokens_per_s * generated_tokens / (prompt_tokens + generated_tokens)


def check_lengths(prompt_tokens: float, generated_tokens: float) -> None:
    """Raise InvalidInputError unless both are at least 1."""
    for field, value in (("prompt", prompt_tokens), ("generate", generated_tokens)):
        if not 1 <= value < math.inf:
            raise InvalidInputError(field, f"must be at least 1 token, is {value}")


def check_capacity(
    prompt_tokens: float, generated_tokens: float, kv_capacity_tokens: float
) -> None:
    """Raise InvalidInputError unless the KV holds one whole sequence."""
    needed_tokens = prompt_tokens + generated_tokens
    if not kv_capacity_tokens >= needed_tokens:
        raise InvalidInputError(
            "kv",
            f"holds {kv_capacity_tokens:.0f} tokens; one sequence of {prompt_tokens:g} +"
            f" {generated_tokens:g} needs {needed_tokens:g}",
        )
