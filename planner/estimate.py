"""Everything about one case: bounds, batch, simulation, memory."""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

from planner import report
from planner.case import Case
from planner.hardware import HardwareSpec
from planner.memory import gpu_memory, host_memory, resident_layers
from planner.scheduler import SchedulerLimits
from planner.simulate import Request, Simulation, SimulationResult, StepRecord
from planner.spec import ModelSpec
from planner.stage1 import (
    Stage1,
    cpu_attention_flops_per_second_needed,
    host_bytes_per_second_needed,
    kv_read_bytes_per_second,
    stage1,
)
from planner.stage2 import Stage2, stage2
from planner.steady import limiting_resource, steady
from planner.units import format_bytes_both

#: Generated tokens of a scaled simulation: what a command can wait for.
SCALED_TOKENS = 60_000
_LEAST_STEP_TOKENS = 500
_LEAST_REQUESTS = 200
_LEAST_SEQUENCES = 32


class Detail(Enum):
    """How much of the workload is simulated."""

    SCALED = "scaled"  # a part of the requests on the same part of pool and step
    FULL = "full"
    NONE = "none"


def estimate(case: Case, detail: Detail = Detail.SCALED) -> report.Estimate:
    """The report of a case. Raises InvalidInputError where the machine lacks a rate that the
    bounds need."""
    return estimate_with_steps(case, detail)[0]


def estimate_with_steps(case: Case, detail: Detail) -> tuple[report.Estimate, list[StepRecord]]:
    """The report, and the iterations that were simulated for it."""
    if detail is Detail.NONE:
        return assemble(case, None), []
    run, scale = simulation(case, detail)
    result = run.result(list(run.run()))
    return assemble(case, simulation_report(result, scale, case.stream_s)), result.steps


def assemble(case: Case, simulated: report.SimulationReport | None) -> report.Estimate:
    """The report of a case around a simulation that has been run, or none."""
    bound, batch = bounds(case), finite_batch(case)
    return report.Estimate(
        model=model_report(case.model),
        hardware=hardware_report(case.hardware),
        workload=_workload(case),
        memory=_memory(case),
        stage1=_stage1(case, bound),
        host_needs=_host_needs(case),
        stage2=None if batch is None else report.Stage2Report(**vars(batch)),
        steady=steady(case),
        simulation=simulated,
        residency=_residency(case, batch),
        notes=tuple(_notes(case)),
    )


def bounds(case: Case) -> Stage1:
    """Stage 1 of a case."""
    return stage1(
        case.workload.prompt_tokens,
        case.workload.generated_tokens,
        case.kv_capacity_tokens,
        case.stream_s,
        case.gpu_tokens_per_s,
    )


def finite_batch(case: Case) -> Stage2 | None:
    """Stage 2 of a case, lengths taken at their means; None where nothing is streamed."""
    if case.stream_s <= 0:
        return None
    return stage2(
        round(case.workload.prompt_tokens),
        round(case.workload.generated_tokens),
        case.workload.n_requests,
        case.kv_capacity_tokens,
        case.block_tokens,
        case.stream_s,
        case.gpu_tokens_per_s,
    )


def simulation(case: Case, detail: Detail = Detail.SCALED) -> tuple[Simulation, float]:
    """(the simulation of a case, its scale): the real scheduler, paced at q*, up to n_real tokens
    in a step. SCALED simulates one request in `scale` on one part in `scale` of the pool, such
    that about SCALED_TOKENS tokens are generated."""
    work = case.workload
    wanted = work.n_requests * work.generated_tokens / SCALED_TOKENS
    # No less than a few requests a step and a few hundred in all, or rounding takes over.
    most = min(case.step_tokens / _LEAST_STEP_TOKENS, work.n_requests / _LEAST_REQUESTS)
    most = min(most, case.kv_capacity_tokens / work.max_sequence_tokens / _LEAST_SEQUENCES)
    scale = max(1.0, min(wanted, most)) if detail is Detail.SCALED else 1.0
    requests = work if scale == 1 else work.thinned(round(work.n_requests / scale))
    scale = work.n_requests / requests.n_requests
    step_tokens = case.step_tokens / scale
    limits = SchedulerLimits(
        max_step_tokens=max(1, round(step_tokens)),
        prompts_per_step=step_tokens / (work.prompt_tokens + work.generated_tokens),
    )
    blocks = max(1, round(case.kv_capacity_tokens / case.block_tokens / scale))
    run = Simulation(
        (Request(prompt, generated) for prompt, generated in requests.lengths()),
        case.costs,
        limits,
        kv_blocks=blocks,
        block_tokens=case.block_tokens,
        scale=scale,
    )
    return run, scale


def simulation_report(
    result: SimulationResult, scale: float, stream_s: float
) -> report.SimulationReport:
    """A finished simulation as reports show it; the limit is the one of most of the time."""
    by_limit = _seconds_by_limit(result, stream_s)
    busy_s = result.busy_s
    return report.SimulationReport(
        tokens_per_s=result.tokens_per_s,
        generated_tokens_per_s=result.generated_tokens_per_s,
        limit=next(iter(by_limit)),
        total_s=result.total_s,
        steps=len(result.steps),
        preemptions=round(result.num_preemptions * scale),
        preemption_share=result.preemption_share,
        mean_kv_use_share=result.mean_kv_use_share,
        mean_step_tokens=result.mean_step_tokens,
        seconds_by_limit=by_limit,
        share_by_limit={name: seconds / busy_s for name, seconds in by_limit.items()},
        requests_simulated=result.requests,
        scale=scale,
    )


def _seconds_by_limit(result: SimulationResult, stream_s: float) -> dict[str, float]:
    """Busy time by the resource that was waited for, longest first."""
    seconds: dict[str, float] = {}
    for step in result.steps:
        name = limiting_resource(step.time, stream_s)
        seconds[name] = seconds.get(name, 0.0) + step.duration_s
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def model_report(model: ModelSpec) -> report.ModelReport:
    """A model as reports show it."""
    return report.ModelReport(
        name=model.name,
        family=model.family,
        n_layers=model.n_layers,
        n_experts=model.n_experts,
        experts_per_token=model.experts_per_token,
        weight_format=model.weight_format,
        kv_format=model.kv_format,
        total_parameters=model.total_parameters,
        active_parameters=model.active_parameters,
        parameters_by_kind=model.parameters_by_kind,
    )


def hardware_report(hardware: HardwareSpec) -> report.HardwareReport:
    """A machine as reports show it."""
    return report.HardwareReport(
        name=hardware.name,
        description=hardware.description,
        gpu=hardware.gpu,
        host=hardware.host,
        gpu_count=hardware.gpu_count,
        quantities=hardware.quantities(),
    )


def _workload(case: Case) -> report.WorkloadReport:
    work = case.workload
    return report.WorkloadReport(
        name=work.name,
        prompt_tokens=work.prompt_tokens,
        generated_tokens=work.generated_tokens,
        max_prompt_tokens=work.max_prompt_tokens,
        requests=work.n_requests,
        distribution=work.distribution,
    )


def _memory(case: Case) -> report.MemoryReport:
    model, hardware = case.model, case.hardware
    return report.MemoryReport(
        weights_bytes=model.weights_bytes,
        streamed_bytes_per_pass=model.streamed_bytes_per_pass,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_bytes=case.kv_bytes,
        kv_capacity_tokens=case.kv_capacity_tokens,
        block_tokens=case.block_tokens,
        resident_bytes=case.resident_bytes,
        resident_layers=resident_layers(model, case.resident_bytes)[0],
        spare_gpu_bytes=gpu_memory(model, hardware, case.step_tokens).free_bytes,
        host=host_memory(model, hardware, case.kv_bytes, case.step_tokens),
        gpu=gpu_memory(model, hardware, case.step_tokens, case.resident_bytes),
    )


def _stage1(case: Case, bound: Stage1) -> report.Stage1Report:
    machine = case.hardware.combined()
    link, gpu = machine.value("link_h2d_bytes_per_s"), bound.gpu_tokens_per_s
    saturation = case.stream_s * gpu if link and gpu else None
    return report.Stage1Report(
        tokens_per_s=bound.tokens_per_s,
        generated_tokens_per_s=bound.generated_tokens_per_s,
        limit=bound.limit,
        kv_tokens_per_s=bound.kv_tokens_per_s,
        gpu_tokens_per_s=gpu,
        pme=bound.pme,
        stream_s=bound.stream_s,
        saturation_tokens=saturation,
        gpu_utilisation_share=bound.tokens_per_s / gpu if gpu else None,
    )


def _host_needs(case: Case) -> report.HostNeedsReport | None:
    """Eqs 5 and 6; None where nothing is streamed, since no pass has a least duration then."""
    machine = case.hardware.combined()
    link = machine.value("link_h2d_bytes_per_s")
    if not link or case.stream_s <= 0:
        return None
    needed_reads = host_bytes_per_second_needed(case.kv_bytes, case.stream_s, link)
    reads = machine.value("host_read_bytes_per_s")
    needed_flops = cpu_attention_flops_per_second_needed(
        case.kv_bytes, case.stream_s, case.model.attention_flops_per_kv_byte
    )
    flops = machine.value("cpu_flops_per_s")
    return report.HostNeedsReport(
        kv_read_bytes_per_s=kv_read_bytes_per_second(case.kv_bytes, case.stream_s),
        read_needed_bytes_per_s=needed_reads,
        read_available_bytes_per_s=reads,
        read_enough=None if reads is None else reads >= needed_reads,
        cpu_needed_flops_per_s=needed_flops,
        cpu_available_flops_per_s=flops,
        cpu_enough=None if flops is None else flops >= needed_flops,
    )


def _residency(case: Case, batch: Stage2 | None) -> report.ResidencyReport | None:
    """What spare GPU memory could hold, and Stage 2 with it; None where it holds no layer."""
    spare = gpu_memory(case.model, case.hardware, case.step_tokens).free_bytes
    if batch is None or spare is None:
        return None
    layers, size = resident_layers(case.model, spare)
    if size <= case.resident_bytes:
        return None
    with_it = finite_batch(replace(case, resident_bytes=float(size)))
    rate = case.gpu_tokens_per_s if with_it is None else with_it.tokens_per_s
    return report.ResidencyReport(layers, size, rate, rate / batch.tokens_per_s - 1)


def _notes(case: Case) -> Iterator[str]:
    """What a reader must know to trust the numbers."""
    host = host_memory(case.model, case.hardware, case.kv_bytes, case.step_tokens)
    if host.fits is False:
        yield f"host memory is short of {format_bytes_both(-(host.free_bytes or 0.0))}"
    gpu = gpu_memory(case.model, case.hardware, case.step_tokens, case.resident_bytes)
    if gpu.fits is False:
        yield f"GPU memory is short of {format_bytes_both(-(gpu.free_bytes or 0.0))}"
    if case.workload.distribution == "assumed":
        yield "prompt lengths between the published mean and maximum are assumed"
    if case.hardware.profiled_model not in ("", case.model.name):
        yield f"device times were measured with {case.hardware.profiled_model}, and are not used"
    assumed = [k for k, q in case.hardware.quantities().items() if q and q.provenance == "assumed"]
    if assumed:
        yield "assumed, not measured: " + ", ".join(assumed)
