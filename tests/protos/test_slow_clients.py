"""A client that does not read holds nothing for ever."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayServicer, GatewayStub, add_GatewayServicer_to_server

from protos.calls import Calls
from protos.errors import decode_failure
from protos.transport import channel

PIECE = "x" * 10_000
BOUND_S = 0.5


class Endless(GatewayServicer):
    """Streams without end; `closed` once its generator was."""

    def __init__(self) -> None:
        self.sent = 0
        self.closed = asyncio.Event()

    async def Generate(
        self, request: messages.GenerateRequest, context: object
    ) -> AsyncIterator[messages.GenerateResponse]:
        try:
            while True:
                self.sent += 1
                yield messages.GenerateResponse(tokens=messages.Tokens(text=PIECE))
        finally:
            self.closed.set()


def test_client_that_never_reads_loses_its_stream_and_is_told_why(tmp_path: Path) -> None:
    async def main() -> None:
        service, address = Endless(), f"unix:{tmp_path}/slow.sock"
        calls = Calls(["moelens.v1.Gateway"], slow_client_s=BOUND_S)
        server = grpc.aio.server(interceptors=[calls])
        add_GatewayServicer_to_server(service, server)
        server.add_insecure_port(address)
        await server.start()
        try:
            async with channel(address) as peer:
                call = GatewayStub(peer).Generate(messages.GenerateRequest())
                await call.read()
                await asyncio.wait_for(service.closed.wait(), 10 * BOUND_S)
                buffered = service.sent
                assert buffered * len(PIECE) < 50e6
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while await call.read() is not grpc.aio.EOF:
                        pass
            failure = decode_failure(caught.value)
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failure.reason == "SLOW_CLIENT"
            assert calls.in_flight == 0
        finally:
            await server.stop(0)

    asyncio.run(main())


def test_client_that_reads_slowly_but_reads_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        service, address = Endless(), f"unix:{tmp_path}/slow.sock"
        calls = Calls(["moelens.v1.Gateway"], slow_client_s=4 * BOUND_S)
        server = grpc.aio.server(interceptors=[calls])
        add_GatewayServicer_to_server(service, server)
        server.add_insecure_port(address)
        await server.start()
        try:
            async with channel(address) as peer:
                call = GatewayStub(peer).Generate(messages.GenerateRequest())
                for _ in range(10):
                    for _ in range(200):
                        await call.read()
                    await asyncio.sleep(BOUND_S)
                assert not service.closed.is_set()
                call.cancel()
        finally:
            await server.stop(0)

    asyncio.run(main())
