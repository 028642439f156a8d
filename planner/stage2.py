"""Stage 2: a finite batch over paged KV with prefill and decode overlapped (Eqs 8-13).

Requests are started q at a time, one group in every pass over the model; each stays for g passes.
"""

import math
from dataclasses import dataclass

from planner.errors import InvalidInputError
from planner.stage1 import check_lengths, generated_share
from planner.units import div_ceil


@dataclass(frozen=True)
class Stage2:
    """Rates are tokens per second, prompt and generated together.

    `kv_prompts_per_step` is q of Eq 9 and `gpu_prompts_per_step` q* of Eq 12, None where the
    device's rate is not known. `limit` is "kv_capacity" (IO-bound: each pass takes the time of
    streaming the weights) or "gpu".
    """

    kv_prompts_per_step: float
    gpu_prompts_per_step: float | None
    prompts_per_step: float
    steps: float
    steady_tokens_per_step: float
    io_tokens_per_s: float
    gpu_tokens_per_s: float | None
    tokens_per_s: float
    generated_tokens_per_s: float
    total_s: float
    limit: str


def stage2(
    prompt_tokens: int,
    generated_tokens: int,
    requests: int,
    kv_capacity_tokens: float,
    block_tokens: int,
    stream_s: float,
    gpu_tokens_per_s: float | None,
) -> Stage2:
    """Eq 13: T = min(T1, T2) with T_i = K (p+g) / ((K/q_i + g) · delta).

    `stream_s` is delta and must be positive: without streaming a pass has no fixed duration and
    Stage 1's device bound is all there is to say.
    Raises InvalidInputError naming the input that makes no sense.
    """
    _check(prompt_tokens, generated_tokens, requests, kv_capacity_tokens, block_tokens, stream_s)
    p, g = prompt_tokens, generated_tokens
    kv_q = kv_prompts_per_step(p, g, kv_capacity_tokens, block_tokens)
    io_rate = batch_tokens_per_s(p, g, requests, kv_q, stream_s)
    gpu_q = None if gpu_tokens_per_s is None else gpu_tokens_per_s * stream_s / (p + g)
    gpu_rate = None if gpu_q is None else batch_tokens_per_s(p, g, requests, gpu_q, stream_s)
    gpu_limits = gpu_rate is not None and gpu_rate < io_rate
    q = gpu_q if gpu_limits and gpu_q is not None else kv_q
    rate = batch_tokens_per_s(p, g, requests, q, stream_s)
    return Stage2(
        kv_prompts_per_step=kv_q,
        gpu_prompts_per_step=gpu_q,
        prompts_per_step=q,
        steps=batch_steps(requests, q, g),
        steady_tokens_per_step=q * (p + g),
        io_tokens_per_s=io_rate,
        gpu_tokens_per_s=gpu_rate,
        tokens_per_s=rate,
        generated_tokens_per_s=generated_share(rate, p, g),
        total_s=requests * (p + g) / rate,
        limit="gpu" if gpu_limits else "kv_capacity",
    )


def kv_prompts_per_step(
    prompt_tokens: int, generated_tokens: int, kv_capacity_tokens: float, block_tokens: int
) -> float:
    """Eq 9 solved for q: the KV of sequences at every stage of their life fills the pool."""
    held = sequence_kv_token_steps(prompt_tokens, generated_tokens, block_tokens)
    return kv_capacity_tokens / held


def sequence_kv_token_steps(prompt_tokens: int, generated_tokens: int, block_tokens: int) -> int:
    """Sum over j = 1 … g of ceil((p+j)/b)·b: KV tokens of a sequence, summed over its passes."""
    end = _sum_of_blocks(prompt_tokens + generated_tokens, block_tokens)
    return block_tokens * (end - _sum_of_blocks(prompt_tokens, block_tokens))


def batch_steps(requests: float, prompts_per_step: float, generated_tokens: float) -> float:
    """Eq 10: K/q + g passes, the last g of which drain the batch."""
    return requests / prompts_per_step + generated_tokens


def batch_tokens_per_s(
    prompt_tokens: float,
    generated_tokens: float,
    requests: float,
    prompts_per_step: float,
    stream_s: float,
) -> float:
    """Eqs 11 and 12: K (p+g) tokens in `batch_steps` passes of delta seconds each."""
    steps = batch_steps(requests, prompts_per_step, generated_tokens)
    return requests * (prompt_tokens + generated_tokens) / (steps * stream_s)


def requests_for_share(share: float, prompts_per_step: float, generated_tokens: float) -> float:
    """K at which a batch reaches `share` of its limit: K/(K + q·g) = share; 19·q·g for 95 %."""
    if not 0 < share < 1:
        raise InvalidInputError("share", f"must lie between 0 and 1, is {share}")
    return share / (1 - share) * prompts_per_step * generated_tokens


def _sum_of_blocks(tokens: int, block_tokens: int) -> int:
    """Sum over k = 1 … tokens of ceil(k / block_tokens): b ones, b twos, …, and the rest."""
    full, rest = divmod(tokens, block_tokens)
    return block_tokens * full * (full + 1) // 2 + rest * (full + 1)


def _check(
    prompt_tokens: int,
    generated_tokens: int,
    requests: int,
    kv_capacity_tokens: float,
    block_tokens: int,
    stream_s: float,
) -> None:
    check_lengths(prompt_tokens, generated_tokens)
    if requests < 1:
        raise InvalidInputError("requests", f"must be at least 1, is {requests}")
    if block_tokens < 1:
        raise InvalidInputError("block", f"must be at least 1 token, is {block_tokens}")
    if not 0 < stream_s < math.inf:
        raise InvalidInputError("stream_s", f"must be a positive duration, is {stream_s}")
    needed_tokens = div_ceil(prompt_tokens + generated_tokens, block_tokens) * block_tokens
    if not kv_capacity_tokens >= needed_tokens:
        raise InvalidInputError(
            "kv",
            f"holds {kv_capacity_tokens:.0f} tokens; one sequence of {prompt_tokens} +"
            f" {generated_tokens} in blocks of {block_tokens} needs {needed_tokens}",
        )
