"""The one way that every service of ours is served.

    class Planner(planner_pb2_grpc.PlannerServicer): ...
    raise SystemExit(run(serve([Planner()], ServingConfig("planner", "unix:/run/x/planner.sock"))))

gRPC over asyncio (uvloop), health (grpc.health.v1: "" and each service, Watch included),
reflection, TLS, message limits, keepalive, logs, and an orderly stop: on the first SIGINT or
SIGTERM health turns NOT_SERVING, new calls are refused, running ones get `grace_s` to end, then the
server closes; a second signal closes it at once. A service is SERVING only when it really can
serve: with a `background` coroutine, once that calls `Serving.set_ready(True)`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import _async as aio_reflection
from grpc_reflection.v1alpha import reflection, reflection_pb2

from protos import errors, logs, transport
from protos.access import Access
from protos.calls import Calls
from protos.transport import ClientTls, ServerTls, channel

__all__ = [
    "ClientTls",
    "ServerTls",
    "Serving",
    "ServingConfig",
    "channel",
    "errors",
    "run",
    "serve",
]

log = structlog.get_logger("serving")

# The descriptor of a pipe whose other end the launcher holds: end of file means that it died.
LIFELINE_VARIABLE = "MOE_LENS_LIFELINE_FD"
REFLECTION_NAMES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
MAX_PENDING_CALLS = 100_000  # accepted by gRPC, not yet by a handler


@dataclass(frozen=True)
class ServingConfig:
    """How one process serves."""

    process: str  # its name in the logs
    listen: str  # unix:/path or host:port (port 0: any free one)
    tls: ServerTls | None = None
    access: Access | None = None  # who may call; None: whoever reaches it
    # A unix socket without TLS beside `listen`, for whoever supervises this process.
    local_listen: str | None = None
    max_message_bytes: int = transport.DEFAULT_MAX_MESSAGE_BYTES
    grace_s: float = 10.0  # for running calls after the first signal

    def __post_init__(self) -> None:
        transport.check_address(self.listen)
        if self.local_listen is not None and transport.unix_path(self.local_listen) is None:
            raise ValueError(f"local_listen {self.local_listen!r} is no unix:/path")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s is {self.grace_s}: expected a number of seconds, 0 or more")


class Serving:
    """A running server, as the service's own background work sees it."""

    def __init__(self, names: Sequence[str], config: ServingConfig) -> None:
        self.names = tuple(names)
        self.config = config
        self.address = config.listen  # with the port that was bound
        self.draining = asyncio.Event()  # set by the first signal
        self.aborting = asyncio.Event()  # set by the second
        self.calls = Calls(names, config.access)
        self.health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def set_ready(self, ready: bool) -> None:
        """Turn the health of all services SERVING or NOT_SERVING (never SERVING again once
        draining)."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if ready and not self.draining.is_set() else status.NOT_SERVING
        for name in ("", *self.names):
            await self.health.set(name, value)

    def stop(self, reason: str) -> None:
        """What a signal does: drain the first time, end at once the second."""
        log.info("stopping", reason=reason, at_once=self.draining.is_set())
        (self.aborting if self.draining.is_set() else self.draining).set()


Background = Callable[[Serving], Coroutine[Any, Any, None]]
Drain = Callable[[float], Awaitable[None]]


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a process's main coroutine on uvloop; return its exit status."""
    return uvloop.run(main)


async def serve(
    servicers: Sequence[object],
    config: ServingConfig,
    *,
    background: Background | None = None,
    drain: Drain | None = None,
) -> int:
    """Serve until a signal comes; return the exit status, 0 after an orderly stop.

    `servicers` are instances of generated `...Servicer` classes. `background` runs beside them
    (load a model, keep a session) and decides readiness; when it raises, the server stops and the
    exception is passed on. `drain(grace_s)` is awaited after admission stopped, before running
    calls are waited for. Raises OSError when the address cannot be bound.
    """
    logs.set_up_logs(config.process)
    services = [_service_of(servicer) for servicer in servicers]
    serving = Serving([name for name, _ in services], config)
    server = await _start(servicers, services, serving)
    _watch_for_the_end(serving)
    work = asyncio.create_task(background(serving)) if background else None
    try:
        if work is None:
            await serving.set_ready(True)
        log.info("listening", address=serving.address, pid=os.getpid())
        failure = await _until_draining(serving, work)
        await _drain(serving, drain)
        if failure is not None:
            raise failure
        return 0
    finally:
        if work is not None:
            work.cancel()
            await asyncio.wait([work])
        await server.stop(0.1)
        _remove_socket(config.listen)
        if config.local_listen is not None:
            _remove_socket(config.local_listen)
        log.info("stopped")


def _service_of(servicer: object) -> tuple[str, Callable[..., None]]:
    """Full name and registration function of the generated class that a servicer derives from."""
    for base in type(servicer).__mro__:
        if base.__module__.endswith("_pb2_grpc"):
            stubs = sys.modules[base.__module__]
            messages = sys.modules[base.__module__.removesuffix("_grpc")]
            services = messages.DESCRIPTOR.services_by_name
            name = services[base.__name__.removesuffix("Servicer")].full_name
            return name, getattr(stubs, f"add_{base.__name__}_to_server")
    raise TypeError(f"{type(servicer).__name__} derives from no generated Servicer class")


async def _start(
    servicers: Sequence[object],
    services: Sequence[tuple[str, Callable[..., None]]],
    serving: Serving,
) -> grpc.aio.Server:
    config = serving.config
    options = [
        *transport.channel_options(config.max_message_bytes),
        # Clients may ping as often as every 5 s, also while a prefill keeps them waiting.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        # Beyond 1,000 calls that wait for Python, gRPC would cancel some without a word; whether
        # there is room is for our own queue to say.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
    ]
    server = grpc.aio.server(interceptors=[serving.calls], options=options)
    for servicer, (_, add) in zip(servicers, services, strict=True):
        add(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(serving.health, server)
    _add_reflection([*serving.names, health.SERVICE_NAME], server)
    port = _bind(server, config)
    if transport.unix_path(config.listen) is None:
        serving.address = f"{config.listen.rpartition(':')[0]}:{port}"
    await serving.set_ready(False)
    await server.start()
    return server


def _add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """v1 differs from v1alpha in its package's name alone; newer tools ask for v1 first."""
    servicer = aio_reflection.ReflectionServicer(service_names=[*names, *REFLECTION_NAMES])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in REFLECTION_NAMES:
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


def _bind(server: grpc.aio.Server, config: ServingConfig) -> int:
    """Bind the address; a unix socket is for its owner alone."""
    previous = os.umask(0o177)
    try:
        for address in filter(None, (config.listen, config.local_listen)):
            _refuse_taken_socket(address)
        if config.local_listen is not None:
            server.add_insecure_port(config.local_listen)
        if config.tls is None:
            if transport.leaves_host(config.listen):
                log.warning("listening beyond this host without TLS", address=config.listen)
            return server.add_insecure_port(config.listen)
        return server.add_secure_port(config.listen, config.tls.credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {config.listen}: {error}") from error
    finally:
        os.umask(previous)


def _refuse_taken_socket(address: str) -> None:
    """gRPC replaces a socket that is there; one that a living process listens on is not ours."""
    path = transport.unix_path(address)
    if path is None:
        return
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
        contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        probe.connect(str(path))
        raise OSError(f"cannot listen on {address}: another process does")


def _watch_for_the_end(serving: Serving) -> None:
    """Stop on a signal, or when the launcher that started this process is gone."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.stop, signal.Signals(number).name)
    lifeline = os.environ.get(LIFELINE_VARIABLE)
    if lifeline is None:
        return
    descriptor = int(lifeline)
    os.set_inheritable(descriptor, False)

    def gone() -> None:
        loop.remove_reader(descriptor)
        serving.stop("the launcher is gone")

    loop.add_reader(descriptor, gone)


async def _until_draining(
    serving: Serving, work: asyncio.Task[None] | None
) -> BaseException | None:
    """Wait for a signal or the background's failure; return the latter."""
    draining = asyncio.create_task(serving.draining.wait())
    waiting: set[asyncio.Task[Any]] = {draining} | ({work} if work else set())
    while not draining.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if work in done and work is not None and work.exception() is not None:
            serving.draining.set()
            draining.cancel()
            return work.exception()
    return None


async def _drain(serving: Serving, drain: Drain | None) -> None:
    """Refuse new calls, then give those in flight their time."""
    serving.calls.closed = "this server is stopping"
    await serving.health.enter_graceful_shutdown()

    async def finish() -> None:
        if drain is not None:
            await drain(serving.config.grace_s)
        await serving.calls.idle.wait()

    finishing = asyncio.create_task(finish())
    abort = asyncio.create_task(serving.aborting.wait())
    await asyncio.wait(
        [finishing, abort],
        timeout=serving.config.grace_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in (finishing, abort):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _remove_socket(address: str) -> None:
    path = transport.unix_path(address)
    if path is not None:
        path.unlink(missing_ok=True)
