"""How each figure of an estimate comes about: its formula, with the numbers put in.

The right-hand side of `numbers` is arithmetic: evaluated, it is `value` to the digits shown.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from planner.case import Case
from planner.errors import InvalidInputError, nearest
from planner.formats import kv_format, weight_format
from planner.report import Estimate
from planner.stage2 import sequence_kv_token_steps

SCHEMA = "moe-lens/explain/1"


@dataclass(frozen=True)
class Explanation:
    """One figure: its name in the estimate's JSON, formula in symbols, the same in numbers."""

    figure: str
    meaning: str
    formula: str
    numbers: str
    value: float
    unit: str
    source: str


def explain(case: Case, found: Estimate, figure: str | None = None) -> list[Explanation]:
    """Every figure that a formula gives, or the one that is asked for (nearest names else)."""
    rows = [*_memory(case), *_stage1(case, found), *_needs(case, found), *_stage2(case, found)]
    rows.extend(_simulation(found))
    if figure is None:
        return rows
    by_name = {row.figure: row for row in rows}
    if figure not in by_name:
        problem = f"{figure!r} is not explained; {nearest(figure, by_name)}"
        raise InvalidInputError("figure", problem)
    return [by_name[figure]]


def to_json(rows: list[Explanation]) -> dict[str, Any]:
    return {"schema": SCHEMA, "figures": [asdict(row) for row in rows]}


def number(value: float) -> str:
    """Enough digits to check the result by hand."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.8g}"


def _memory(case: Case) -> Iterator[Explanation]:
    model = case.model
    attention = model.attention
    fmt = kv_format(model.kv_format)
    scales = (1 if attention.kind == "mla" else 2) * attention.n_kv_heads * fmt.scale_bytes
    scale_text = f" + {scales}" if scales else ""
    what = "latent" if attention.kind == "mla" else "2 · KV heads · head size"
    yield Explanation(
        "memory.kv_bytes_per_token",
        "KV cache that one token takes over all layers",
        f"layers · ({what} · bytes per element{' + scales' if scales else ''})",
        f"{model.n_layers} * ({attention.kv_elements} * {fmt.bytes_per_element}{scale_text})",
        model.kv_bytes_per_token,
        "bytes",
        "config.json",
    )
    bits = weight_format(model.weight_format).bits_per_parameter
    yield Explanation(
        "memory.streamed_bytes_per_pass",
        "W, weights of all decoder layers, which one pass moves to the GPU",
        f"sum over layers ({float(bits):.4g} bits per quantised parameter, the rest in 16)",
        " + ".join(_grouped(model.layer_weights_bytes)),
        model.streamed_bytes_per_pass,
        "bytes",
        "config.json",
    )
    yield Explanation(
        "memory.kv_capacity_tokens",
        "M, tokens that the KV pool holds in whole blocks",
        "floor(KV bytes / bytes per token / block) · block",
        f"{number(case.kv_bytes)} / {model.kv_bytes_per_token} // {case.block_tokens}"
        f" * {case.block_tokens}",
        case.kv_capacity_tokens,
        "tokens",
        "",
    )


def _grouped(sizes: tuple[int, ...]) -> Iterator[str]:
    """Equal sizes as a product, in order of appearance."""
    for value in dict.fromkeys(sizes):
        yield f"{sizes.count(value)} * {value}"


def _stage1(case: Case, found: Estimate) -> Iterator[Explanation]:
    stage, machine = found.stage1, case.hardware.combined()
    p, g = number(case.workload.prompt_tokens), number(case.workload.generated_tokens)
    streamed = case.model.streamed_bytes_per_pass
    link = machine.value("link_h2d_bytes_per_s")
    if link:
        kept = f" * (1 - {number(case.resident_share)})" if case.resident_share else ""
        yield Explanation(
            "stage1.stream_s",
            "delta, time to stream the weights once",
            "W · (1 - resident share) / B_IO" if kept else "W / B_IO",
            f"{streamed}{kept} / {number(link)}",
            stage.stream_s,
            "s",
            "",
        )
    yield Explanation(
        "stage1.pme",
        "Parallelism-Memory Efficiency: tokens processed per pass and token of KV",
        "2 (p + g) / ((2p + g) g)",
        f"2 * ({p} + {g}) / ((2 * {p} + {g}) * {g})",
        stage.pme,
        "",
        "Eq 3",
    )
    if stage.kv_tokens_per_s is not None:
        yield Explanation(
            "stage1.kv_tokens_per_s",
            "what the KV pool allows while passes wait for the weights",
            "PME · M / delta",
            f"{number(stage.pme)} * {case.kv_capacity_tokens} / {number(stage.stream_s)}",
            stage.kv_tokens_per_s,
            "tokens/s",
            "Eq 4",
        )
    yield from _gpu(case, found)
    bounds = [b for b in (stage.kv_tokens_per_s, stage.gpu_tokens_per_s) if b is not None]
    yield Explanation(
        "stage1.tokens_per_s",
        f"upper bound; limited by {stage.limit}",
        "min(PME · M / delta, T_GPU)",
        f"min({', '.join(number(b) for b in bounds)})" if len(bounds) > 1 else number(bounds[0]),
        stage.tokens_per_s,
        "tokens/s",
        "Eq 4",
    )
    yield Explanation(
        "stage1.generated_tokens_per_s",
        "its generated part",
        "T · g / (p + g)",
        f"{number(stage.tokens_per_s)} * {g} / ({p} + {g})",
        stage.generated_tokens_per_s,
        "tokens/s",
        "Eq 4",
    )


def _gpu(case: Case, found: Estimate) -> Iterator[Explanation]:
    stage, machine = found.stage1, case.hardware.combined()
    gpu = stage.gpu_tokens_per_s
    if gpu is None:
        return
    per_token_s = machine.value("device_time_per_token_s")
    if per_token_s and case.hardware.profiled_model in ("", case.model.name):
        formula, numbers = "1 / (L · a1)", f"1 / ({case.model.n_layers} * {per_token_s!r})"
    else:
        rate = machine.value("gpu_sustained_flops_per_s") or machine.require("gpu_flops_per_s")
        formula = "C_GPU / (2 · active parameters)"
        numbers = f"{number(rate)} / (2 * {case.model.active_parameters})"
    yield Explanation(
        "stage1.gpu_tokens_per_s",
        "T_GPU, what the GPU computes when it never waits",
        formula,
        numbers,
        gpu,
        "tokens/s",
        "Eq 4",
    )
    if stage.saturation_tokens is not None:
        yield Explanation(
            "stage1.saturation_tokens",
            "tokens in one pass from which the GPU, not the link, is the limit",
            "T_GPU · delta",
            f"{number(gpu)} * {number(stage.stream_s)}",
            stage.saturation_tokens,
            "tokens",
            "Eq 2",
        )


def _needs(case: Case, found: Estimate) -> Iterator[Explanation]:
    needs = found.host_needs
    if needs is None:
        return
    link = case.hardware.combined().require("link_h2d_bytes_per_s")
    yield Explanation(
        "host_needs.kv_read_bytes_per_s",
        "B_KV, KV that CPU attention reads when all of it is read once a pass",
        "KV bytes / delta",
        f"{number(case.kv_bytes)} / {number(found.stage1.stream_s)}",
        needs.kv_read_bytes_per_s,
        "bytes/s",
        "Eq 5",
    )
    yield Explanation(
        "host_needs.read_needed_bytes_per_s",
        "host memory reads of attention and link together",
        "B_KV + B_IO",
        f"{number(needs.kv_read_bytes_per_s)} + {number(link)}",
        needs.read_needed_bytes_per_s,
        "bytes/s",
        "Eq 5",
    )
    yield Explanation(
        "host_needs.cpu_needed_flops_per_s",
        "compute of CPU attention",
        "FLOP per KV byte · B_KV",
        f"{number(case.model.attention_flops_per_kv_byte)} * {number(needs.kv_read_bytes_per_s)}",
        needs.cpu_needed_flops_per_s,
        "FLOP/s",
        "Eq 6",
    )


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
