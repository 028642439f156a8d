"""How the figures of a finite batch come about: Stage 2, with all costs, and simulated."""

from collections.abc import Iterator

from planner.case import Case
from planner.explanation import Explanation, number
from planner.report import Estimate
from planner.stage2 import sequence_kv_token_steps


def batch_rows(case: Case, found: Estimate) -> Iterator[Explanation]:
    """Explanations of Stage 2, the steady rate, the simulation and residency."""
    yield from _stage2(case, found)
    yield from _stage2_passes(case, found)
    yield from _steady(case, found)
    yield from _simulation(found)
    yield from _residency(found)


def _stage2(case: Case, found: Estimate) -> Iterator[Explanation]:
    stage = found.stage2
    if stage is None:
        return
    p, g = round(case.workload.prompt_tokens), round(case.workload.generated_tokens)
    requests, block = case.workload.n_requests, case.block_tokens
    held = sequence_kv_token_steps(p, g, block)
    yield Explanation(
        "stage2.kv_prompts_per_step",
        f"q, prompts started in each pass such that the KV of all stages of life fits; the sum over"
        f" j = 1..{g} of ceil(({p} + j) / {block}) · {block} is {held}",
        "M / sum of ceil((p + j) / b) · b",
        f"{case.kv_capacity_tokens} / {held}",
        stage.kv_prompts_per_step,
        "prompts",
        "Eq 9",
    )
    rates = [("io", stage.kv_prompts_per_step, stage.io_tokens_per_s, "Eq 11")]
    if stage.gpu_prompts_per_step is not None and stage.gpu_tokens_per_s is not None:
        yield Explanation(
            "stage2.gpu_prompts_per_step",
            "q*, prompts in each pass that the GPU keeps up with",
            "T_GPU · delta / (p + g)",
            f"{number(found.stage1.gpu_tokens_per_s or 0)} * {number(found.stage1.stream_s)}"
            f" / ({p} + {g})",
            stage.gpu_prompts_per_step,
            "prompts",
            "Eq 12",
        )
        rates.append(("gpu", stage.gpu_prompts_per_step, stage.gpu_tokens_per_s, "Eq 12"))
    for name, q, rate, source in rates:
        yield Explanation(
            f"stage2.{name}_tokens_per_s",
            "K requests in K/q + g passes of delta",
            "K (p + g) / ((K/q + g) · delta)",
            f"{requests} * ({p} + {g}) / (({requests} / {number(q)} + {g})"
            f" * {number(found.stage1.stream_s)})",
            rate,
            "tokens/s",
            source,
        )
    yield Explanation(
        "stage2.tokens_per_s",
        f"the finite batch; limited by {stage.limit}",
        "min(T1, T2)" if len(rates) > 1 else "T1",
        f"min({', '.join(number(r[2]) for r in rates)})" if len(rates) > 1 else number(rates[0][2]),
        stage.tokens_per_s,
        "tokens/s",
        "Eq 13",
    )
    yield Explanation(
        "stage2.generated_tokens_per_s",
        "its generated part",
        "T · g / (p + g)",
        f"{number(stage.tokens_per_s)} * {g} / ({p} + {g})",
        stage.generated_tokens_per_s,
        "tokens/s",
        "Eq 13",
    )
    yield Explanation(
        "stage2.total_s",
        "time for all requests",
        "K (p + g) / T",
        f"{requests} * ({p} + {g}) / {number(stage.tokens_per_s)}",
        stage.total_s,
        "s",
        "Eq 10",
    )


def _stage2_passes(case: Case, found: Estimate) -> Iterator[Explanation]:
    stage = found.stage2
    if stage is None:
        return
    p, g = round(case.workload.prompt_tokens), round(case.workload.generated_tokens)
    known = [q for q in (stage.kv_prompts_per_step, stage.gpu_prompts_per_step) if q is not None]
    yield Explanation(
        "stage2.prompts_per_step",
        "prompts started in each pass: what the KV or the GPU allows",
        "min(q, q*)",
        f"min({', '.join(number(q) for q in known)})" if len(known) > 1 else number(known[0]),
        stage.prompts_per_step,
        "prompts",
        "Eqs 9 and 12",
    )
    yield Explanation(
        "stage2.steps",
        "passes over the model, the last g of which drain the batch",
        "K/q + g",
        f"{case.workload.n_requests} / {number(stage.prompts_per_step)} + {g}",
        stage.steps,
        "passes",
        "Eq 10",
    )
    yield Explanation(
        "stage2.steady_tokens_per_step",
        "n, tokens in a pass in steady state",
        "q (p + g)",
        f"{number(stage.prompts_per_step)} * ({p} + {g})",
        stage.steady_tokens_per_step,
        "tokens",
        "Eq 8",
    )


def _simulation(found: Estimate) -> Iterator[Explanation]:
    run = found.simulation
    if run is None:
        return
    shares = ", ".join(f"{name} {part:.0%}" for name, part in run.share_by_limit.items())
    yield Explanation(
        "simulation.tokens_per_s",
        f"{run.steps} iterations of the real scheduler, each as long as its slowest resource"
        f" ({shares} of the time)",
        "tokens of all requests / simulated time",
        f"{number(run.tokens_per_s * run.total_s)} / {number(run.total_s)}",
        run.tokens_per_s,
        "tokens/s",
        "iteration model",
    )
    work = found.workload
    if work.distribution == "uniform":
        p, g = number(work.prompt_tokens), number(work.generated_tokens)
        yield Explanation(
            "simulation.generated_tokens_per_s",
            "its generated part",
            "T · g / (p + g)",
            f"{number(run.tokens_per_s)} * {g} / ({p} + {g})",
            run.generated_tokens_per_s,
            "tokens/s",
            "iteration model",
        )


def _steady(case: Case, found: Estimate) -> Iterator[Explanation]:
    """A pass at full load, resource by resource, and the batch that is made of such passes."""
    stage, costs = found.steady, case.costs
    layers, tokens = case.model.n_layers, number(stage.step_tokens)
    busy = stage.seconds_by_resource
    if costs.link_h2d_bytes_per_s:
        streamed = number(costs.layer_bytes * (1 - costs.resident_share))
        moved = f"({streamed} + {tokens} * {number(costs.to_device_bytes_per_token)})"
        alone = f"{layers} * {moved} / {number(costs.link_h2d_bytes_per_s)}"
        slowdown, attention = number(costs.link_slowdown), number(busy["attention"])
        yield Explanation(
            "steady.seconds_by_resource.link",
            "weights and attention outputs moved to the GPU, slowed while CPU attention runs",
            "min(t + kappa · attention, t / (1 - kappa)), t = L (W_l + n · output bytes) / B_IO",
            f"min({alone} + {slowdown} * {attention}, {alone} / (1 - {slowdown}))",
            busy["link"],
            "s",
            "iteration model",
        )
    if costs.attention_bytes_per_s and not costs.windowed_share:
        yield _attention(case, found)
    yield Explanation(
        "steady.pass_s",
        f"a pass at full load: {stage.prompts_per_step:.4g} prompts started, {tokens} tokens",
        "slowest of link, device, attention, host memory (and pipeline fill), + head + overhead",
        f"{number(stage.pass_s - busy['head'] - busy['overhead'])} + {number(busy['head'])}"
        f" + {number(busy['overhead'])}",
        stage.pass_s,
        "s",
        "iteration model",
    )
    work = case.workload
    yield Explanation(
        "steady.tokens_per_s",
        f"all tokens over the passes' time, ramp and drain included; limited by {stage.limit}",
        "K (p + g) / sum of passes",
        f"{work.n_requests} * ({number(work.prompt_tokens)} + {number(work.generated_tokens)})"
        f" / {number(stage.total_s)}",
        stage.tokens_per_s,
        "tokens/s",
        "Stage 2 with all costs",
    )


def _attention(case: Case, found: Estimate) -> Explanation:
    stage, costs = found.steady, case.costs
    p = case.workload.prompt_tokens
    alive = stage.step_tokens / stage.prompts_per_step - p  # groups that decode
    decodes = stage.prompts_per_step * alive
    context = p + (alive + 1) / 2
    per_token = number(costs.kv_bytes_per_token)
    sequences = f" + {number(costs.attention_sequence_s)} * {number(decodes)}"
    fixed = f" + {costs.n_groups} * {number(costs.attention_fixed_s)}"
    kv = f"{number(decodes)} * {number(context)} * {per_token}"
    pairs = stage.prompts_per_step * p * (p + 1) / 2 if costs.prefill_on_cpu else 0.0
    prefill = f" + {number(costs.attention_pair_s)} * {number(pairs)}" if pairs else ""
    return Explanation(
        "steady.seconds_by_resource.attention",
        "KV read by CPU attention: sequences that decode, times their mean context",
        "L (sequences · context · KV bytes per layer / B_attn + cost per sequence)",
        f"{case.model.n_layers} * ({kv} / {number(costs.attention_bytes_per_s or 0)}"
        f"{sequences if costs.attention_sequence_s else ''}"
        f"{fixed if costs.attention_fixed_s else ''}{prefill})",
        stage.seconds_by_resource["attention"],
        "s",
        "iteration model",
    )


def _residency(found: Estimate) -> Iterator[Explanation]:
    saved = found.residency
    if saved is None or found.stage2 is None:
        return
    yield Explanation(
        "residency.gain_share",
        f"what {saved.layers} layers in spare GPU memory, not streamed, add to Stage 2",
        "Stage 2 with them / Stage 2 - 1",
        f"{number(saved.stage2_tokens_per_s)} / {number(found.stage2.tokens_per_s)} - 1",
        saved.gain_share,
        "",
        "",
    )
