"""How each figure of an estimate comes about: its formula, with the numbers put in.

The right-hand side of `numbers` is arithmetic: evaluated, it is `value` to the digits shown.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from planner.case import Case
from planner.errors import InvalidInputError, nearest
from planner.explain_batch import batch_rows
from planner.explanation import Explanation, number
from planner.formats import kv_format, weight_format
from planner.report import Estimate

SCHEMA = "moe-lens/explain/1"


def explain(case: Case, found: Estimate, figure: str | None = None) -> list[Explanation]:
    """Every figure that a formula gives, or the one that is asked for (nearest names else)."""
    rows = [
        *_memory(case),
        *_stage1(case, found),
        *_utilisation(found),
        *_needs(case, found),
        *batch_rows(case, found),
    ]
    if figure is None:
        return rows
    by_name = {row.figure: row for row in rows}
    if figure not in by_name:
        problem = f"{figure!r} is not explained; {nearest(figure, by_name)}"
        raise InvalidInputError("figure", problem)
    return [by_name[figure]]


def to_json(rows: list[Explanation]) -> dict[str, Any]:
    return {"schema": SCHEMA, "figures": [asdict(row) for row in rows]}


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
    outside = (model.embedding + model.final_norm + model.head).total
    rest_bits = weight_format(model.weight_format).rest_bits_per_parameter
    yield Explanation(
        "memory.weights_bytes",
        "all weights: the layers, and embedding, final norm and head, which stay on the GPU",
        "W + parameters outside the layers · bytes",
        f"{model.streamed_bytes_per_pass} + {outside} * {rest_bits} // 8",
        model.weights_bytes,
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


def _utilisation(found: Estimate) -> Iterator[Explanation]:
    stage = found.stage1
    if stage.gpu_tokens_per_s is None or stage.gpu_utilisation_share is None:
        return
    yield Explanation(
        "stage1.gpu_utilisation_share",
        "how much of the GPU the bound uses",
        "T / T_GPU",
        f"{number(stage.tokens_per_s)} / {number(stage.gpu_tokens_per_s)}",
        stage.gpu_utilisation_share,
        "",
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
