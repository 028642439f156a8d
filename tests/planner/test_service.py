"""moelens.v1.Planner over a socket: every call, its errors, health and reflection."""

import asyncio
import contextlib
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from moelens.v1 import planner_pb2 as messages
from moelens.v1.planner_pb2_grpc import PlannerStub

from planner import catalogue
from planner.estimate import Detail, estimate
from planner.hardware import HardwareSpec
from planner.inputs import CaseInputs
from planner.service import PlannerService
from protos import serving
from protos.errors import decode_failure

UNIFORM = messages.UniformWorkload(prompt_tokens=98, generated_tokens=32, requests=2000)


def case(**more) -> messages.Case:
    values = {
        "model_name": "mixtral-8x7b",
        "hardware_name": "a40-xeon8380",
        "uniform": UNIFORM,
        "kv_bytes": 70_000_000_000,
    }
    values.update(more)
    return messages.Case(**{key: value for key, value in values.items() if value is not None})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a planner that serves on a thread of its own."""
    import threading

    address = f"unix:{tmp_path_factory.mktemp('planner')}/planner.sock"
    ready, stop = threading.Event(), {}

    async def background(running: serving.Serving) -> None:
        stop["loop"], stop["serving"] = asyncio.get_running_loop(), running
        await running.set_ready(True)
        ready.set()
        await asyncio.Event().wait()

    async def main() -> None:
        config = serving.ServingConfig("planner", address, grace_s=1.0)
        with contextlib.suppress(asyncio.CancelledError):
            await serving.serve([PlannerService()], config, background=background)

    thread = threading.Thread(target=lambda: _run(main), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield address
    stop["loop"].call_soon_threadsafe(stop["serving"].stop, "the tests are over")
    thread.join(30)
    assert not thread.is_alive()


def _run(main) -> None:
    """An event loop that takes no signals: those belong to the main thread."""
    loop = asyncio.new_event_loop()
    loop.add_signal_handler = lambda *arguments: None
    loop.run_until_complete(main())
    loop.close()


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(server) as channel:
        yield PlannerStub(channel)


def failure(call, request):
    with pytest.raises(grpc.RpcError) as raised:
        result = call(request)
        list(result) if hasattr(result, "__next__") else result
    return decode_failure(raised.value)


def test_an_estimate_is_the_librarys(stub):
    report = stub.Estimate(messages.EstimateRequest(case=case())).report
    inputs = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "32", "2000", kv="70GB")
    found = estimate(inputs.case(), Detail.SCALED)
    assert report.schema == "moe-lens/estimate/1"
    assert report.stage1.tokens_per_s == pytest.approx(found.stage1.tokens_per_s)
    assert report.stage2.total_s == pytest.approx(found.stage2.total_s)
    assert report.steady.limit == found.steady.limit
    assert report.simulation.tokens_per_s == pytest.approx(found.simulation.tokens_per_s)
    assert report.memory.weights_bytes == found.memory.weights_bytes
    assert report.memory.host.fits
    assert dict(report.model.parameters_by_kind) == found.model.parameters_by_kind
    assert report.hardware.quantities["link_h2d_bytes_per_s"].provenance == "measured"
    assert "n_real_tokens" not in report.hardware.quantities


def test_a_config_and_a_hardware_file_travel_as_json(stub):
    config = catalogue.read_model_config("olmoe-1b-7b")
    machine = catalogue.hardware("t4-gcp-n1")
    request = messages.EstimateRequest(
        case=case(
            model_name=None,
            hardware_name=None,
            model_config_json=json.dumps(config),
            hardware_json=json.dumps(machine.to_json()),
            weight_format="int4",
            kv_format="int8",
            block_tokens=32,
            resident_auto=True,
        ),
        simulation=messages.SIMULATION_DETAIL_NONE,
    )
    report = stub.Estimate(request).report
    assert (report.model.family, report.model.weight_format) == ("olmoe", "int4")
    assert report.hardware.name == "t4-gcp-n1"
    assert report.memory.block_tokens == 32
    assert report.memory.resident_layers > 0
    assert not report.HasField("simulation")


def test_a_configuration_is_of_the_model_that_its_machine_was_profiled_with(stub):
    machine = catalogue.hardware("t4-gcp-n1").with_values(
        "measured", "", device_time_fixed_s=1e-3, device_time_per_token_s=1e-4
    )
    data = {**machine.to_json(), "profiled_model": "my-olmoe"}
    config = json.dumps(catalogue.read_model_config("olmoe-1b-7b"))
    profiled = case(
        model_name=None,
        hardware_name=None,
        model_config_json=config,
        hardware_json=json.dumps(data),
        kv_bytes=1_000_000_000,
    )
    report = stub.Estimate(messages.EstimateRequest(case=profiled)).report
    assert report.model.name == "my-olmoe"
    assert report.stage1.gpu_tokens_per_s == pytest.approx(1 / (16 * 1e-4))


def test_traces_and_named_workloads(stub):
    trace = messages.TraceWorkload(prompt_tokens=[10, 20], generated_tokens=[5, 7])
    report = stub.Estimate(
        messages.EstimateRequest(case=case(uniform=None, trace=trace, kv_bytes=1_000_000_000))
    ).report
    assert (report.workload.requests, report.workload.prompt_tokens) == (2, 15)
    named = messages.EstimateRequest(
        case=case(uniform=None, workload_name="rag", requests=100),
        simulation=messages.SIMULATION_DETAIL_NONE,
    )
    assert stub.Estimate(named).report.workload.max_prompt_tokens == 1843
    assert stub.Estimate(named).report.workload.requests == 100


def test_a_simulation_streams_progress_and_ends_with_its_report(stub):
    lengths = messages.UniformWorkload(prompt_tokens=98, generated_tokens=64, requests=4000)
    events = list(stub.Simulate(messages.SimulateRequest(case=case(uniform=lengths))))
    *progress, last = events
    assert last.WhichOneof("event") == "report"
    assert last.report.requests_simulated == 4000
    assert progress
    shares = [event.progress.requests_finished for event in progress]
    assert shares == sorted(shares)
    assert shares[-1] <= 4000
    assert all(0 <= event.progress.kv_use_share <= 1 for event in progress)


def test_a_cancelled_simulation_ends_and_the_service_goes_on(stub):
    lengths = messages.UniformWorkload(prompt_tokens=98, generated_tokens=256, requests=200_000)
    call = stub.Simulate(messages.SimulateRequest(case=case(uniform=lengths)))
    next(call)
    call.cancel()
    assert stub.ListModels(messages.ListModelsRequest(), timeout=30).models


def test_sizes_name_the_least_machine(stub):
    request = messages.SizeRequest(case=case(kv_bytes=None), tokens_per_s=900, no_machines=True)
    report = stub.Size(request).report
    memory = next(o for o in report.options if o.resource == "host memory")
    assert memory.least > 93e9
    assert memory.tokens_per_s >= 900
    assert not report.machines
    assert report.figure == "steady.tokens_per_s"
    assert {change.change for change in report.changes} >= {"KV in 8 bits", "weights in 4 bits"}


def test_a_sweep_is_a_table(stub):
    axes = [messages.SweepAxis(input="kv", values=["50GB", "100GB"])]
    answer = stub.Sweep(messages.SweepRequest(base=case(), axes=axes))
    assert answer.columns[0] == "kv"
    assert [row.values[0] for row in answer.rows] == ["50GB", "100GB"]
    column = list(answer.columns).index("stage2.tokens_per_s")
    assert float(answer.rows[0].values[column]) < float(answer.rows[1].values[column])


def test_the_catalogue_is_listed(stub):
    models = stub.ListModels(messages.ListModelsRequest()).models
    assert {m.model.name for m in models} == set(catalogue.model_names())
    listed = stub.ListHardware(messages.ListHardwareRequest())
    assert {m.name for m in listed.machines} == set(catalogue.hardware_names())
    assert "rtx4090" in listed.gpus


def test_a_calibration_returns_a_hardware_file_that_can_be_used(stub):
    steps = [
        messages.ObservedStep(tokens=t, sequences=10, device_s=32 * (1e-3 + 2e-6 * t))
        for t in (100, 1000, 5000, 10_000)
    ]
    request = messages.CalibrateRequest(
        hardware_name="a40-xeon8380", model_name="mixtral-8x7b", n_layers=32, steps=steps
    )
    answer = stub.Calibrate(request)
    fitted = HardwareSpec.from_json(json.loads(answer.hardware_json))
    assert fitted.require("device_time_per_token_s") == pytest.approx(2e-6)
    assert answer.fits[0].term == "device"
    with_it = case(hardware_name=None, hardware_json=answer.hardware_json)
    assert stub.Estimate(messages.EstimateRequest(case=with_it)).report.stage1.limit


def admit_request(**more):
    values = {
        "prompt_tokens": 100,
        "max_tokens": 50,
        "kv_capacity_tokens": 10_000,
        "block_tokens": 16,
        "max_waiting_requests": 4,
        "tokens_per_s": 100.0,
        "max_context_tokens": 4096,
    }
    return messages.AdmitRequest(**(values | more))


def test_admission_takes_refuses_and_says_when_to_come_back(stub):
    taken = stub.Admit(admit_request())
    assert taken.admitted
    assert not taken.HasField("retry_after_s")
    full = stub.Admit(admit_request(waiting_requests=4, waiting_tokens=4000))
    assert not full.admitted
    assert full.retry_after_s > 0
    never = stub.Admit(admit_request(max_tokens=5000))
    assert not never.admitted
    assert "context" in never.reason
    assert not never.HasField("retry_after_s")


@pytest.mark.parametrize(
    ("method", "request_message", "code", "field"),
    [
        ("Estimate", lambda: case(model_name="mixtral"), "NOT_FOUND", "model"),
        ("Estimate", lambda: case(hardware_name="a41"), "NOT_FOUND", "hardware"),
        ("Estimate", lambda: case(model_name=None), "INVALID_ARGUMENT", "case.model"),
        ("Estimate", lambda: case(hardware_name=None), "INVALID_ARGUMENT", "case.hardware"),
        ("Estimate", lambda: case(uniform=None), "INVALID_ARGUMENT", "case.workload"),
        ("Estimate", lambda: case(kv_bytes=1000), "INVALID_ARGUMENT", "kv"),
        ("Estimate", lambda: case(kv_bytes=2**63), "INVALID_ARGUMENT", "case.kv_bytes"),
        ("Estimate", lambda: case(requests=2**31), "INVALID_ARGUMENT", "case.requests"),
        ("Estimate", lambda: case(kv_format="bf17"), "INVALID_ARGUMENT", "kv_format"),
        (
            "Estimate",
            lambda: case(model_name=None, model_config_json="{"),
            "INVALID_ARGUMENT",
            "model_config_json",
        ),
        (
            "Estimate",
            lambda: case(hardware_name=None, hardware_json="{}"),
            "INVALID_ARGUMENT",
            "hardware_json.schema",
        ),
        (
            "Estimate",
            lambda: case(uniform=messages.UniformWorkload(prompt_tokens=0, generated_tokens=1)),
            "INVALID_ARGUMENT",
            "prompt",
        ),
    ],
)
def test_wrong_cases_are_statuses_that_name_the_field(stub, method, request_message, code, field):
    found = failure(stub.Estimate, messages.EstimateRequest(case=request_message()))
    assert (found.code.name, found.field) == (code, field)


def test_other_wrong_requests(stub):
    simulate = messages.SimulateRequest(case=case(), simulation=messages.SIMULATION_DETAIL_NONE)
    assert failure(stub.Simulate, simulate).field == "simulation"
    assert failure(stub.Size, messages.SizeRequest(case=case(kv_bytes=None))).field == "target"
    assert failure(stub.Sweep, messages.SweepRequest(base=case())).field == "over"
    few = messages.CalibrateRequest(hardware_name="a40-xeon8380", n_layers=32)
    assert failure(stub.Calibrate, few).field == "steps"
    assert failure(stub.Admit, admit_request(prompt_tokens=0)).field == "prompt_tokens"


@pytest.mark.parametrize("name", ["/etc", ".", "/proc/self"])
def test_names_are_never_files_of_the_server(stub, name):
    found = failure(stub.Estimate, messages.EstimateRequest(case=case(model_name=name)))
    assert found.code == grpc.StatusCode.NOT_FOUND
    axes = [messages.SweepAxis(input="trace", values=["/etc/hostname"])]
    (row,) = stub.Sweep(messages.SweepRequest(base=case(), axes=axes)).rows
    assert "cannot be read from here" in row.values[-1]


def test_health_and_reflection_are_on(server):
    with grpc.insecure_channel(server) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "moelens.v1.Planner"):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        assert "moelens.v1.Planner" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    import signal
    import subprocess
    import sys

    address = f"unix:{tmp_path}/planner.sock"
    command = [sys.executable, "-m", "planner.cli", "serve", "--listen", address]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
            models = PlannerStub(channel).ListModels(messages.ListModelsRequest(), timeout=30)
            assert len(models.models) >= 10
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert not (tmp_path / "planner.sock").exists()
    finally:
        process.kill()
        process.wait()
