import asyncio
from types import SimpleNamespace

import pytest
from moelens.v1 import gateway_pb2 as ours
from moelens.v1 import inference_pb2 as theirs

from gateway.kserve import InferenceService
from protos.errors import NotFound, Unavailable


class Load:
    """Stands for the gateway: ready, not ready, or still loading."""

    def __init__(self, ready: bool | None) -> None:
        self.ready = ready

    async def GetLoad(self, request: object, context: object) -> ours.GetLoadResponse:
        if self.ready is None:
            raise Unavailable("loading")
        return ours.GetLoadResponse(ready=self.ready)


def service(ready: bool | None = True) -> InferenceService:
    return InferenceService(Load(ready), SimpleNamespace(name="demo"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("state", "expected"), [(True, True), (False, False), (None, False)])
def test_ready_follows_the_gateway_and_live_does_not(state: bool | None, expected: bool) -> None:
    async def run() -> None:
        probed = service(state)
        live = await probed.ServerLive(theirs.ServerLiveRequest(), None)  # type: ignore[arg-type]
        ready = await probed.ServerReady(theirs.ServerReadyRequest(), None)  # type: ignore[arg-type]
        model = theirs.ModelReadyRequest(name="demo")
        model_ready = await probed.ModelReady(model, None)  # type: ignore[arg-type]
        assert (live.live, ready.ready, model_ready.ready) == (True, expected, expected)

    asyncio.run(run())


def test_metadata_names_the_model_and_refuses_others() -> None:
    async def run() -> None:
        request = theirs.ModelMetadataRequest(name="demo")
        found = await service().ModelMetadata(request, None)  # type: ignore[arg-type]
        assert found.name == "demo"
        with pytest.raises(NotFound, match="demo"):
            await service().ModelMetadata(theirs.ModelMetadataRequest(name="x"), None)  # type: ignore[arg-type]

    asyncio.run(run())
