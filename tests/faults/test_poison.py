"""NaN in one expert: the request that is routed there fails, and nobody else notices."""

import asyncio

import grpc
import pytest
from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.errors import Failure, decode_failure
from protos.transport import channel
from tests.faults.load import Request, reference, requests, token_ids
from tests.faults.poison import TRAP_TOKEN, harmless
from tests.faults.rig import Rig


async def failure_of(stub: GatewayStub, request: Request) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await token_ids(stub, request)
    return decode_failure(caught.value)


def test_request_routed_to_a_poisoned_expert_fails_and_31_others_are_unharmed(rig: Rig) -> None:
    async def main() -> None:
        good = [harmless(request) for request in requests(31, seed=4)]
        bad = Request((5, 6, TRAP_TOKEN, 7), 40, 0.0, 1)
        async with channel(rig.address) as peer:
            stub = GatewayStub(peer)
            expected = await reference(stub, good)
            failing = asyncio.create_task(failure_of(stub, bad))
            got = await asyncio.gather(*(token_ids(stub, request) for request in good))
            failure = await failing
        assert got == expected
        assert failure.code is grpc.StatusCode.DATA_LOSS
        assert "not finite" in failure.message

    asyncio.run(main())
