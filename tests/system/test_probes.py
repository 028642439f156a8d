"""Each of the four services answers health checks and lists itself to clients that know nothing."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection

from protos.transport import unix_path
from tests.servers import Up, up

SERVES = {
    "gateway": (
        "moelens.v1.Gateway",
        "inference.GRPCInferenceService",
        "vllm.grpc.engine.VllmEngine",
    ),
    "planner": ("moelens.v1.Planner",),
    "gpu_worker": ("moelens.v1.GpuWorker",),
    "cpu_worker": ("moelens.v1.CpuWorker",),
}
ALL = [(process, name) for process, names in SERVES.items() for name in ("", *names)]
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
EVERYWHERE = {"grpc.health.v1.Health", *REFLECTION}
STATUS = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("probes"), "--kv=64MB") as running:
        yield running


def channel_to(server: Up, process: str) -> grpc.Channel:
    address = server.address if process == "gateway" else f"unix:{server.directory}/{process}.sock"
    assert process == "gateway" or unix_path(address).is_socket()  # type: ignore[union-attr]
    return grpc.insecure_channel(address)


@pytest.mark.parametrize(("process", "name"), ALL)
def test_check_says_serving(server: Up, process: str, name: str) -> None:
    with channel_to(server, process) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=name), timeout=10
        )
    assert answer.status == STATUS.SERVING


@pytest.mark.parametrize("process", SERVES)
def test_check_of_an_unknown_service_is_not_found(server: Up, process: str) -> None:
    others = [name for other, names in SERVES.items() if other != process for name in names]
    with channel_to(server, process) as channel:
        for name in ("nobody", *others):
            request = health_pb2.HealthCheckRequest(service=name)
            with pytest.raises(grpc.RpcError) as caught:
                health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


@pytest.mark.parametrize(("process", "name"), [*ALL, ("planner", "nobody")])
def test_watch_begins_with_the_present_state_and_stays_open(
    server: Up, process: str, name: str
) -> None:
    with channel_to(server, process) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=1)
        expected = STATUS.SERVICE_UNKNOWN if name == "nobody" else STATUS.SERVING
        assert next(watch).status == expected
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]


class Stranger:
    """Learns a server's services over one version of the reflection protocol."""

    def __init__(self, channel: grpc.Channel, protocol: str) -> None:
        # The two versions differ in the service's name alone.
        self._ask = channel.stream_stream(
            f"/{protocol}/ServerReflectionInfo",
            request_serializer=reflection.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection.ServerReflectionResponse.FromString,
        )
        self._pool = DescriptorPool()
        self._known: set[str] = set()

    def names(self) -> list[str]:
        """Full names of all services."""
        answer = self._answer(list_services="")
        return [service.name for service in answer.list_services_response.service]

    def methods(self, service: str) -> list[str]:
        """Of one service, whose messages can all be built."""
        self._add(self._answer(file_containing_symbol=service))
        return [method.name for method in self._pool.FindServiceByName(service).methods]

    def error_code(self, symbol: str) -> int:
        """That it gets for a symbol."""
        return self._answer(file_containing_symbol=symbol).error_response.error_code

    def _answer(self, **question: str) -> reflection.ServerReflectionResponse:
        request = reflection.ServerReflectionRequest(**question)
        (answer,) = self._ask(iter([request]), timeout=10)
        return answer

    def _add(self, answer: reflection.ServerReflectionResponse) -> None:
        files = [
            FileDescriptorProto.FromString(data)
            for data in answer.file_descriptor_response.file_descriptor_proto
        ]
        for file in files:
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for dependency in file.dependency:
                self._add(self._answer(file_by_filename=dependency))
            self._pool.Add(file)


@pytest.mark.parametrize("protocol", REFLECTION)
@pytest.mark.parametrize("process", SERVES)
def test_a_stranger_learns_every_service_and_its_methods(
    server: Up, process: str, protocol: str
) -> None:
    with channel_to(server, process) as channel:
        stranger = Stranger(channel, protocol)
        assert set(stranger.names()) == {*SERVES[process], *EVERYWHERE}
        assert all(stranger.methods(name) for name in SERVES[process])
        assert {"Check", "Watch"} <= set(stranger.methods("grpc.health.v1.Health"))
        assert stranger.error_code("nobody.Nothing") == grpc.StatusCode.NOT_FOUND.value[0]


def test_watch_tells_of_the_stop(server: Up) -> None:
    """The last test of this module: it ends the server."""
    with channel_to(server, "gateway") as channel:
        request = health_pb2.HealthCheckRequest(service="moelens.v1.Gateway")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60)
        assert next(watch).status == STATUS.SERVING
        server.stop()
        assert next(watch).status == STATUS.NOT_SERVING
        with pytest.raises((grpc.RpcError, StopIteration)):
            next(watch)
