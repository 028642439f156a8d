"""A small service served the way all of them are, seen from a client."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from moelens.v1 import cpu_worker_pb2, cpu_worker_pb2_grpc

from protos.errors import decode_failure
from protos.transport import check_address

SERVER = textwrap.dedent(
    """
    import asyncio, sys
    from moelens.v1 import cpu_worker_pb2 as pb, cpu_worker_pb2_grpc as rpc
    from protos.serving import ServingConfig, errors, run, serve

    class Worker(rpc.CpuWorkerServicer):
        async def Configure(self, request, context):
            if request.n_layers == 0:
                raise errors.InvalidArgument("is 0; expected 1 or more", field="n_layers")
            if request.n_layers == 1:
                raise errors.ResourceExhausted("queue is full", retry_after_s=1.5)
            if request.n_layers == 2:
                raise KeyError("secret")
            return pb.ConfigureResponse(segment_path="somewhere")

        async def Stats(self, request, context):
            await asyncio.sleep(1.0)
            return pb.StatsResponse(jobs=7)

    async def background(serving):
        await asyncio.sleep(float(sys.argv[2]))
        if sys.argv[3] == "fail":
            raise RuntimeError("no model here")
        await serving.set_ready(True)

    config = ServingConfig("cpu-worker", sys.argv[1], grace_s=float(sys.argv[4]))
    raise SystemExit(run(serve([Worker()], config, background=background)))
    """
)


@contextmanager
def served(
    address: str, load_s: float = 0.0, mode: str = "ok", grace_s: float = 5.0
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", SERVER, address, str(load_s), mode, str(grace_s)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(channel: grpc.Channel, status: int, service: str = "", limit_s: float = 20.0) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    end = time.monotonic() + limit_s
    while stub.Check(request, wait_for_ready=True, timeout=limit_s).status != status:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s.sock"


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "moelens.v1.CpuWorker"


def test_health_turns_serving_only_when_the_background_says_so(address: str) -> None:
    with served(address, load_s=2.0), grpc.insecure_channel(address) as channel:
        wait_for(channel, NOT_SERVING, NAME)
        wait_for(channel, SERVING, NAME)
        wait_for(channel, SERVING, "")


def test_errors_arrive_with_code_field_and_retry_advice(address: str) -> None:
    with served(address), grpc.insecure_channel(address) as channel:
        stub = cpu_worker_pb2_grpc.CpuWorkerStub(channel)

        def failure(n_layers: int):  # type: ignore[no-untyped-def]
            with pytest.raises(grpc.RpcError) as caught:
                stub.Configure(
                    cpu_worker_pb2.ConfigureRequest(n_layers=n_layers),
                    wait_for_ready=True,
                    timeout=20,
                )
            return decode_failure(caught.value)

        bad = failure(0)
        assert (bad.code, bad.field) == (grpc.StatusCode.INVALID_ARGUMENT, "n_layers")
        assert bad.message == "n_layers: is 0; expected 1 or more"
        full = failure(1)
        assert (full.code, full.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.5)
        bug = failure(2)
        assert bug.code == grpc.StatusCode.INTERNAL
        assert "secret" not in bug.message


def test_first_signal_lets_running_calls_end_and_refuses_new_ones(address: str) -> None:
    with served(address) as process, grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
        stub = cpu_worker_pb2_grpc.CpuWorkerStub(channel)
        running = stub.Stats.future(cpu_worker_pb2.StatsRequest(), timeout=10)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Stats(cpu_worker_pb2.StatsRequest(), timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert running.result().jobs == 7
        assert process.wait(5) == 0
        assert not Path(address.removeprefix("unix:")).exists()


def test_second_signal_ends_at_once(address: str) -> None:
    with served(address, grace_s=60) as process, grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
        stub = cpu_worker_pb2_grpc.CpuWorkerStub(channel)
        running = stub.Stats.future(cpu_worker_pb2.StatsRequest(), timeout=10)
        time.sleep(0.2)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.wait(5)
        assert time.monotonic() - begin < 0.8
        assert running.exception() is not None


def test_open_health_watch_does_not_hold_up_the_stop(address: str) -> None:
    with served(address, grace_s=60) as process, grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        assert process.wait(5) == 0


def test_failed_background_ends_the_process_with_its_error(address: str) -> None:
    with served(address, mode="fail") as process:
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "no model here" in stderr


def test_process_stops_when_the_launcher_of_its_lifeline_dies(address: str) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", SERVER, address, "0", "ok", "5"]
    environment = {**os.environ, "MOE_LENS_LIFELINE_FD": str(read)}
    process = subprocess.Popen(command, env=environment, pass_fds=[read], stderr=subprocess.PIPE)
    os.close(read)
    with grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
    os.close(write)
    process.communicate(timeout=5)
    assert process.returncode == 0


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_services(address: str, version: str) -> None:
    with served(address), grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME),
        ]
        listed, described = list(call(iter(requests), timeout=10))
        names = {service.name for service in listed.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names
        assert described.file_descriptor_response.file_descriptor_proto


def test_socket_of_a_running_server_is_not_taken_over(address: str) -> None:
    with served(address) as first, grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
        with served(address) as second:
            _, stderr = second.communicate(timeout=20)
            assert "another process does" in stderr
        assert second.returncode == 1
        wait_for(channel, SERVING)
        assert first.poll() is None


def test_socket_that_a_dead_server_left_is_replaced(address: str) -> None:
    with served(address) as first, grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)
        first.kill()
    assert Path(address.removeprefix("unix:")).exists()
    with served(address), grpc.insecure_channel(address) as channel:
        wait_for(channel, SERVING)


def test_tcp_server_reports_the_port_it_bound() -> None:
    with served("127.0.0.1:0") as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "listening" in line)
        assert '"address": "127.0.0.1:' in line
        assert '"address": "127.0.0.1:0"' not in line


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("unix:relative", "absolute"),
        ("unix:/" + "x" * 200, "bytes long"),
        ("localhost", "neither"),
        ("localhost:99999", "neither"),
        (":80", "neither"),
    ],
)
def test_wrong_address_says_what_is_wrong(address: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_address(address)
