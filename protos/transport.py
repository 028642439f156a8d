"""Addresses, TLS and channels: how one process of ours reaches another.

An address is `unix:/path` or `host:port`. Nothing listens on every interface unless told so.
"""

import asyncio
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# sizeof(sockaddr_un.sun_path) less the terminating zero.
MAX_UNIX_PATH_BYTES = 107
DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_PERIOD_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# Between processes of ours a connection that carries nothing any more is to be noticed sooner.
PEER_KEEPALIVE_PERIOD_MS = 3_000
PEER_KEEPALIVE_TIMEOUT_MS = 5_000


def check_address(address: str) -> str:
    """Return the address, or raise ValueError saying what is wrong with it."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"address {address!r}: a unix socket needs an absolute path")
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ValueError(
                f"address {address!r}: the socket's path is {len(os.fsencode(path))} bytes long, "
                f"the system takes {MAX_UNIX_PATH_BYTES}"
            )
        return address
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address {address!r} is neither unix:/path nor host:port")
    return address


def unix_path(address: str) -> Path | None:
    """The socket's path of a unix address, None for TCP."""
    if not address.startswith("unix:"):
        return None
    return Path(address.removeprefix("unix:").removeprefix("//"))


def leaves_host(address: str) -> bool:
    """Whether other machines can reach this address."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


@dataclass(frozen=True)
class ServerTls:
    """PEM files of a server. With `client_ca` every client must show a certificate (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError when a file cannot be read."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        ca = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


@dataclass(frozen=True)
class ClientTls:
    """PEM files of a client: the authority that it trusts and, for mTLS, its own certificate."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file cannot be read."""

        def read(path: Path | None) -> bytes | None:
            return path.read_bytes() if path else None

        return grpc.ssl_channel_credentials(read(self.ca), read(self.key), read(self.certificate))


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Options that both ends of a connection share."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_PERIOD_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Options of a client: as above, and a lost peer is tried again every second at the latest."""
    return [
        *channel_options(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In spite of its name, also the least time that a connection gets to come about: a busy
        # server does not shake hands in much less.
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        # A channel of its own: a restarted server is not met through a connection being given up.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def channel(
    address: str,
    tls: ClientTls | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    further_options: Mapping[str, int] = MappingProxyType({}),
) -> grpc.aio.Channel:
    """An asyncio channel to one of our services."""
    chosen = {**dict(client_options(max_message_bytes)), **further_options}
    options = list(chosen.items())
    if tls is None:
        return grpc.aio.insecure_channel(check_address(address), options)
    return grpc.aio.secure_channel(check_address(address), tls.credentials(), options)


def peer(address: str, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel to a service of ours: with TLS over TCP, without over a unix socket, which no
    other host and, by its directory's mode, no other user reaches."""
    keepalive = {
        "grpc.keepalive_time_ms": PEER_KEEPALIVE_PERIOD_MS,
        "grpc.keepalive_timeout_ms": PEER_KEEPALIVE_TIMEOUT_MS,
        # Where something arrives but makes no sense, only a ping without an answer tells.
        "grpc.http2.ping_timeout_ms": PEER_KEEPALIVE_TIMEOUT_MS,
    }
    return channel(address, None if unix_path(address) else tls, further_options=keepalive)


async def is_serving(peer: grpc.aio.Channel, service: str = "", timeout_s: float = 2.0) -> bool:
    """Whether the peer says that it serves `service` ("": all of its services)."""
    stub = health_pb2_grpc.HealthStub(peer)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await stub.Check(request, timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_until_serving(
    peer: grpc.aio.Channel, service: str = "", timeout_s: float = 60.0, period_s: float = 0.1
) -> None:
    """Return once the peer serves; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not await is_serving(peer, service):  # noqa: ASYNC110 - the peer is another process
            await asyncio.sleep(period_s)
