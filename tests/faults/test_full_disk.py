"""The disk that batches are kept on is full: that batch fails and says so, nobody else notices."""

import asyncio
import json

import grpc
import pytest
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.transport import channel
from tests.faults.batch import rows, submit, until_ended
from tests.faults.load import reference, requests, token_ids
from tests.faults.poison import harmless
from tests.faults.rig import Rig, filled


def test_batch_without_room_for_its_records_fails_alone_and_others_go_on(rig: Rig) -> None:
    if not rig.owns_batch_disk:
        pytest.skip("needs the right to mount a file system that may be filled")
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows(150, seed=5))

    async def main() -> None:
        asked = [harmless(request) for request in requests(4, seed=8)]
        async with channel(rig.address) as peer:
            stub = GatewayStub(peer)
            expected = await reference(stub, asked)
            await submit(stub, "starved", data)
            with filled(rig.batch_dir):
                streams = asyncio.gather(*(token_ids(stub, request) for request in asked))
                progress = await until_ended(stub, "starved")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await submit(stub, "refused", data)
                assert await streams == expected
            assert progress.state == messages.BATCH_STATE_FAILED
            assert "No space left" in progress.problem
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await submit(stub, "fed", data)
            fed = await until_ended(stub, "fed")
            assert fed.state == messages.BATCH_STATE_COMPLETED
            assert (fed.succeeded_rows, fed.failed_rows) == (135, 15)

    asyncio.run(main())
