"""KServe's Open Inference Protocol v2, as far as platforms probe a server with it."""

from importlib.metadata import version

from moelens.v1 import gateway_pb2 as ours
from moelens.v1 import inference_pb2 as theirs
from moelens.v1.inference_pb2_grpc import GRPCInferenceServiceServicer

from gateway.model import ServedModel
from gateway.service import Gateway
from protos.calls import Context
from protos.errors import NotFound, Unavailable

Tensor = theirs.ModelMetadataResponse.TensorMetadata


class InferenceService(GRPCInferenceServiceServicer):
    """See inference.proto for each call."""

    def __init__(self, gateway: Gateway, model: ServedModel) -> None:
        self._gateway = gateway
        self._model = model

    async def ServerLive(
        self, request: theirs.ServerLiveRequest, context: Context
    ) -> theirs.ServerLiveResponse:
        """This process answers."""
        return theirs.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: theirs.ServerReadyRequest, context: Context
    ) -> theirs.ServerReadyResponse:
        """Requests are taken."""
        return theirs.ServerReadyResponse(ready=await self._ready(context))

    async def ModelReady(
        self, request: theirs.ModelReadyRequest, context: Context
    ) -> theirs.ModelReadyResponse:
        """The same, for the model that is served."""
        self._check_name(request.name)
        return theirs.ModelReadyResponse(ready=await self._ready(context))

    async def ServerMetadata(
        self, request: theirs.ServerMetadataRequest, context: Context
    ) -> theirs.ServerMetadataResponse:
        """Name and version."""
        return theirs.ServerMetadataResponse(name="moe-lens", version=version("moe-lens"))

    async def ModelMetadata(
        self, request: theirs.ModelMetadataRequest, context: Context
    ) -> theirs.ModelMetadataResponse:
        """Text in, text out."""
        self._check_name(request.name)
        return theirs.ModelMetadataResponse(
            name=self._model.name,
            versions=["1"],
            platform="moe-lens",
            inputs=[Tensor(name="text", datatype="BYTES", shape=[1])],
            outputs=[Tensor(name="text", datatype="BYTES", shape=[1])],
        )

    async def _ready(self, context: Context) -> bool:
        try:
            return (await self._gateway.GetLoad(ours.GetLoadRequest(), context)).ready
        except Unavailable:
            return False

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            problem = f"{name[:200]!r} is not served here; {self._model.name!r} is"
            raise NotFound(problem, field="name")
