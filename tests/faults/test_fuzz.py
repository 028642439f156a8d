"""A part of `python -m tests.faults.fuzz`, which sends 20,000 messages and more."""

import asyncio

from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.transport import channel
from tests.faults.fuzz import fuzzed
from tests.faults.load import requests, token_ids
from tests.faults.rig import Rig

CALLS = 600


async def generated(rig: Rig) -> tuple[int, ...]:
    async with channel(rig.address) as peer:
        return await token_ids(GatewayStub(peer), requests(1, seed=6)[0])


def test_no_message_to_any_service_crashes_hangs_or_is_an_internal_error(rig: Rig) -> None:
    before = asyncio.run(generated(rig))
    fuzzer = fuzzed(rig, CALLS, chance=1)
    assert not fuzzer.problems, "\n".join(fuzzer.problems[:5])
    assert len(fuzzer.sent) == len(fuzzer.rpcs)
    assert asyncio.run(generated(rig)) == before
