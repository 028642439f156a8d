"""moelens.v1.Planner over gRPC: messages to cases, reports to messages."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias, TypeVar

import grpc
import typer
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from moelens.v1 import planner_pb2 as messages
from moelens.v1 import planner_pb2_grpc

from planner import lists, sizing
from planner.admission import ServerLoad, admit
from planner.calibrate import Fit, ObservedStep, calibrate
from planner.case import AUTO, Case
from planner.catalogue import gpu_names, hardware, hardware_names, host_names
from planner.errors import InvalidInputError, NotFoundError
from planner.estimate import Detail, estimate, hardware_report, simulation, simulation_report
from planner.hardware import HardwareSpec
from planner.inputs import CaseInputs
from planner.simulate import Simulation, StepRecord
from planner.spec import ModelSpec
from planner.sweep import Axis, sweep
from planner.workload import Lengths, Workload
from protos import errors, serving
from protos.options import ServingSecurity, with_options

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Answer = TypeVar("Answer")
Reply = TypeVar("Reply", bound=Message)
#: At most one progress message in so many seconds.
PROGRESS_PERIOD_S = 0.1
#: Requests of a workload.
MAX_REQUESTS = 1_000_000
#: Of memory: no machine has more, and what is computed from it stays in 64 bits.
MAX_BYTES = 2**60

_DETAILS = {
    messages.SIMULATION_DETAIL_SCALED: Detail.SCALED,
    messages.SIMULATION_DETAIL_FULL: Detail.FULL,
    messages.SIMULATION_DETAIL_NONE: Detail.NONE,
}
_FIGURES = {
    messages.SIZING_FIGURE_STAGE2: sizing.Figure.STAGE2,
    messages.SIZING_FIGURE_SIMULATION: sizing.Figure.SIMULATION,
}


class PlannerService(planner_pb2_grpc.PlannerServicer):
    """Every call is pure; what computes for longer than a moment does so in a thread."""

    async def Estimate(
        self, request: messages.EstimateRequest, context: Context
    ) -> messages.EstimateResponse:
        detail = _DETAILS.get(request.simulation, Detail.SCALED)
        found = await _in_thread(lambda: estimate(inputs_of(request.case).case(), detail))
        return messages.EstimateResponse(report=_filled(messages.EstimateReport(), found.to_json()))

    async def Simulate(
        self, request: messages.SimulateRequest, context: Context
    ) -> AsyncIterator[messages.SimulateResponse]:
        detail = _DETAILS.get(request.simulation, Detail.FULL)
        if detail is Detail.NONE:
            raise errors.InvalidArgument("NONE leaves nothing to stream", field="simulation")
        case = await _in_thread(lambda: inputs_of(request.case).case())
        async for event in _follow(lambda stop: _simulated(case, detail, stop)):
            yield event

    async def Size(self, request: messages.SizeRequest, context: Context) -> messages.SizeResponse:
        found = await _in_thread(
            lambda: sizing.size(_problem(request), machines=not request.no_machines)
        )
        return messages.SizeResponse(report=_filled(messages.SizeReport(), found.to_json()))

    async def Sweep(
        self, request: messages.SweepRequest, context: Context
    ) -> messages.SweepResponse:
        axes = [Axis(axis.input.replace("-", "_"), tuple(axis.values)) for axis in request.axes]
        detail = _DETAILS.get(request.simulation, Detail.NONE)
        result = await _in_thread(lambda: sweep(inputs_of(request.base), axes, detail))
        rows = [["" if value is None else str(value) for value in row] for row in result.rows]
        return messages.SweepResponse(
            columns=result.columns, rows=[messages.SweepRow(values=row) for row in rows]
        )

    async def ListModels(
        self, request: messages.ListModelsRequest, context: Context
    ) -> messages.ListModelsResponse:
        return messages.ListModelsResponse(models=[_entry(e) for e in lists.model_entries()])

    async def ListHardware(
        self, request: messages.ListHardwareRequest, context: Context
    ) -> messages.ListHardwareResponse:
        machines = [asdict(hardware_report(hardware(name))) for name in hardware_names()]
        return messages.ListHardwareResponse(
            machines=[_filled(messages.HardwareReport(), machine) for machine in machines],
            gpus=gpu_names(),
            hosts=host_names(),
        )

    async def Calibrate(
        self, request: messages.CalibrateRequest, context: Context
    ) -> messages.CalibrateResponse:
        def fitted() -> tuple[HardwareSpec, list[Fit]]:
            steps = [ObservedStep(**_plain(step)) for step in request.steps]
            start = _hardware(request)
            return calibrate(start, request.n_layers, steps, request.model_name)

        machine, fits = await _in_thread(fitted)
        return messages.CalibrateResponse(
            hardware_json=json.dumps(machine.to_json()),
            fits=[_filled(messages.TermFit(), vars(fit)) for fit in fits],
        )

    async def Admit(
        self, request: messages.AdmitRequest, context: Context
    ) -> messages.AdmitResponse:
        with _reported():
            load = ServerLoad(
                kv_capacity_tokens=request.kv_capacity_tokens,
                block_tokens=request.block_tokens,
                waiting_requests=request.waiting_requests,
                waiting_tokens=request.waiting_tokens,
                running_requests=request.running_requests,
                unfinished_tokens=request.unfinished_tokens,
                max_waiting_requests=request.max_waiting_requests,
                max_context_tokens=request.max_context_tokens,
                tokens_per_s=request.tokens_per_s or None,
            )
            answer = admit(load, request.prompt_tokens, request.max_tokens)
        return messages.AdmitResponse(
            admitted=answer.admitted,
            reason=answer.reason,
            retry_after_s=answer.retry_after_s,
            expected_wait_s=answer.wait_s,
            expected_s=answer.total_s,
        )


def inputs_of(case: messages.Case) -> CaseInputs:
    """The inputs that a message gives. Names are the catalogue's, never files of this machine."""
    machine = _hardware(case)
    _check_size(case)
    return CaseInputs(
        model=_model(case, machine),
        hardware=machine,
        workload=_workload(case),
        kv=_text(case, "kv_bytes"),
        block=_text(case, "block_tokens"),
        resident=AUTO if case.resident_auto else _text(case, "resident_bytes"),
        weights=_text(case, "weight_format"),
        kv_format=_text(case, "kv_format"),
        requests=_text(case, "requests"),
        local_files=False,
    )


def _check_size(case: messages.Case) -> None:
    """A service computes what is done in seconds; the library takes any number of requests."""
    for field, count in (("uniform.requests", case.uniform.requests), ("requests", case.requests)):
        if count > MAX_REQUESTS:
            raise InvalidInputError(
                f"case.{field}", f"must be at most {MAX_REQUESTS} for a service, is {count}"
            )
    for field in ("kv_bytes", "resident_bytes"):
        if getattr(case, field) > MAX_BYTES:
            problem = f"must be at most {MAX_BYTES} (1 EiB), is {getattr(case, field)}"
            raise InvalidInputError(f"case.{field}", problem)


def _text(case: messages.Case, field: str) -> str | None:
    return str(getattr(case, field)) if case.HasField(field) else None


def _model(case: messages.Case, machine: HardwareSpec) -> str | ModelSpec:
    """A configuration has no name: it is taken to be what the machine's profile was measured with,
    so that the profile's times of a layer count."""
    if case.HasField("model_config_json"):
        config = _object(case.model_config_json, "model_config_json")
        return ModelSpec.from_config(config, machine.profiled_model or None)
    if not case.model_name:
        raise InvalidInputError("case.model", "missing; give model_name or model_config_json")
    return case.model_name


def _hardware(case: messages.Case | messages.CalibrateRequest) -> HardwareSpec:
    if case.HasField("hardware_json"):
        data = _object(case.hardware_json, "hardware_json")
        return HardwareSpec.from_json(data, "hardware_json")
    if not case.hardware_name:
        raise InvalidInputError("case.hardware", "missing; give hardware_name or hardware_json")
    return hardware(case.hardware_name)


def _workload(case: messages.Case) -> str | Workload:
    if case.HasField("uniform"):
        lengths = case.uniform
        return Workload.uniform(lengths.prompt_tokens, lengths.generated_tokens, lengths.requests)
    if case.HasField("trace"):
        prompts, generated = case.trace.prompt_tokens, case.trace.generated_tokens
        if len(prompts) != len(generated):
            problem = f"has {len(generated)} entries, prompt_tokens {len(prompts)}"
            raise InvalidInputError("case.trace.generated_tokens", problem)
        pairs = zip(prompts, generated, strict=True)
        return Workload.from_lengths([Lengths(p, g) for p, g in pairs])
    if not case.workload_name:
        problem = "missing; give workload_name, uniform or trace"
        raise InvalidInputError("case.workload", problem)
    return case.workload_name


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(field, f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInputError(field, "holds no JSON object")
    return data


def _problem(request: messages.SizeRequest) -> sizing.Problem:
    chosen = request.WhichOneof("target")
    value = getattr(request, chosen) if chosen else None
    target = sizing.Target(
        all_tokens_per_s=value if chosen == "tokens_per_s" else None,
        generated_tokens_per_s=value if chosen == "generated_tokens_per_s" else None,
        within_s=value if chosen == "within_s" else None,
    )
    figure = _FIGURES.get(request.by, sizing.Figure.STEADY)
    return sizing.Problem.of(inputs_of(request.case), target, figure.name.lower())


def _plain(step: messages.ObservedStep) -> dict[str, Any]:
    return {field.name: getattr(step, field.name) for field in step.DESCRIPTOR.fields}


def _entry(entry: dict[str, Any]) -> messages.ModelEntry:
    own = {field.name for field in messages.ModelEntry.DESCRIPTOR.fields}
    reported = {field.name for field in messages.ModelReport.DESCRIPTOR.fields}
    data = {key: value for key, value in entry.items() if key in own}
    data["model"] = {key: value for key, value in entry.items() if key in reported}
    return _filled(messages.ModelEntry(), data)


def _filled(message: Reply, data: dict[str, Any]) -> Reply:
    """The message with a report's fields; what is not known stays unset."""
    return ParseDict(_known(data), message)


def _known(value: Any) -> Any:
    """JSON without nulls; fields that a message cannot hold are none of a report's."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value


@contextmanager
def _reported() -> Iterator[None]:
    """Wrong inputs as statuses that name the field."""
    try:
        yield
    except NotFoundError as error:
        raise errors.NotFound(error.problem, field=error.field) from error
    except InvalidInputError as error:
        raise errors.InvalidArgument(error.problem, field=error.field) from error


async def _in_thread(work: Callable[[], Answer]) -> Answer:
    with _reported():
        return await asyncio.to_thread(work)


Events = Callable[[threading.Event], Iterator[messages.SimulateResponse]]


async def _follow(events: Events) -> AsyncIterator[messages.SimulateResponse]:
    """What a generator yields in a thread of its own; it is told to stop when nobody listens."""
    stop, loop = threading.Event(), asyncio.get_running_loop()
    queue: asyncio.Queue[messages.SimulateResponse | None] = asyncio.Queue()

    def work() -> None:
        try:
            for event in events(stop):
                loop.call_soon_threadsafe(queue.put_nowait, event)
        finally:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    running = asyncio.ensure_future(_in_thread(work))
    try:
        while (event := await queue.get()) is not None:
            yield event
    finally:
        stop.set()
    await running


def _simulated(
    case: Case, detail: Detail, stop: threading.Event
) -> Iterator[messages.SimulateResponse]:
    run, scale = simulation(case, detail)
    steps: list[StepRecord] = []
    next_at = time.monotonic() + PROGRESS_PERIOD_S
    for step in run.run():
        if stop.is_set():
            return
        steps.append(step)
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + PROGRESS_PERIOD_S
            yield messages.SimulateResponse(progress=_progress(run, step, len(steps), scale))
    report = simulation_report(run.result(steps), scale, case.stream_s)
    filled = _filled(messages.SimulationReport(), vars(report))
    yield messages.SimulateResponse(report=filled)


def _progress(
    run: Simulation, step: StepRecord, count: int, scale: float
) -> messages.SimulationProgress:
    share = step.finished / run.requests
    tokens = (run.prompt_tokens + run.generated_tokens) * scale * share
    now_s = step.start_s + step.duration_s
    return messages.SimulationProgress(
        steps=count,
        simulated_s=now_s,
        requests_finished=round(step.finished * scale),
        requests=round(run.requests * scale),
        tokens_per_s=tokens / now_s,
        kv_use_share=step.kv_blocks / run.scheduler.pool.total_blocks,
    )


app = typer.Typer(add_completion=False)


@app.command("serve")
@with_options(ServingSecurity)
def serve(
    security: ServingSecurity,
    listen: Annotated[
        str, typer.Option(help="unix:/path or host:port.", envvar="MOE_LENS_PLANNER_LISTEN")
    ] = "127.0.0.1:50052",
    grace_s: Annotated[
        float,
        typer.Option(help="For running calls after the first signal.", envvar="MOE_LENS_GRACE_S"),
    ] = 10.0,
) -> None:
    """Serve moelens.v1.Planner over gRPC until a signal comes."""
    try:
        config = security.config("planner", listen, grace_s)
        status = serving.run(serving.serve([PlannerService()], config))
    except (OSError, ValueError) as error:
        print(f"moe-lens plan serve: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(status)
