"""The convenience client, both ways, against a server whose answers are written down here."""

import asyncio
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from moelens.client import AsyncClient, Client, RequestFailed, Security
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server

from protos import errors


class Scripted(GatewayServicer):
    """Two outputs, interleaved; a refusal for the prompt "bad"."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.requests: list[messages.GenerateRequest] = []

    def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.metadata = dict(context.invocation_metadata())
        self.requests.append(request)
        if request.text == "bad":
            error = errors.ResourceExhausted("full", field="text", retry_after_s=2.0)
            context.set_trailing_metadata(((errors.DETAILS_KEY, errors.status_details(error)),))
            context.abort(error.code, str(error))
        yield messages.GenerateResponse(started=messages.Started(request_id="r", seed=9))
        for index, text, ids in ((0, "Hel", [1]), (1, "Wor", [4]), (0, "lo", [2, 3])):
            tokens = messages.Tokens(index=index, text=text, token_ids=ids)
            yield messages.GenerateResponse(tokens=tokens)
        for index, reason in ((1, messages.FINISH_REASON_STOP), (0, messages.FINISH_REASON_LENGTH)):
            yield messages.GenerateResponse(
                finished=messages.Finished(
                    index=index, reason=reason, prompt_tokens=7, generated_tokens=index + 1
                )
            )

    def Tokenize(self, request, context):  # type: ignore[no-untyped-def]
        return messages.TokenizeResponse(token_ids=[len(request.text)])

    def Detokenize(self, request, context):  # type: ignore[no-untyped-def]
        return messages.DetokenizeResponse(text="x" * len(request.token_ids))

    def Abort(self, request, context):  # type: ignore[no-untyped-def]
        return messages.AbortResponse(found=request.request_id == "known")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Scripted]]:
    address = f"unix:{tmp_path}/s.sock"
    service = Scripted()
    running = grpc.server(futures.ThreadPoolExecutor(4))
    add_GatewayServicer_to_server(service, running)
    running.add_insecure_port(address)
    running.start()
    yield address, service
    running.stop(0)


def test_outputs_are_put_together_by_index(server: tuple[str, Scripted]) -> None:
    address, service = server
    with Client(address, Security(token="secret")) as client:
        first, second = client.generate("x", n=2, temperature=0.5, stop_token_ids=[3])
    assert (first.text, first.token_ids, first.finish_reason) == ("Hello", [1, 2, 3], "length")
    assert (second.text, second.finish_reason, second.seed) == ("Wor", "stop", 9)
    assert (first.prompt_tokens, second.generated_tokens) == (7, 2)
    assert service.metadata["authorization"] == "Bearer secret"
    assert service.requests[0].sampling.temperature == 0.5
    assert list(service.requests[0].sampling.stop_token_ids) == [3]


def test_asynchronous_client_does_the_same(server: tuple[str, Scripted]) -> None:
    async def main() -> None:
        async with AsyncClient(server[0]) as client:
            first, _ = await client.generate([5, 6], n=2)
            assert first.text == "Hello"
            events = [event async for event in client.stream([{"role": "user", "content": "hi"}])]
            assert [event.text for event in events] == ["Hel", "Wor", "lo", "", ""]
            assert [event.finish_reason for event in events[-2:]] == ["stop", "length"]
            assert await client.tokenize("abc") == [3]
            assert await client.detokenize([1, 2]) == "xx"
            assert await client.abort("known")
            with pytest.raises(RequestFailed):
                await client.generate("bad")

    asyncio.run(main())
    ids, chat = server[1].requests[:2]
    assert list(ids.token_ids.ids) == [5, 6]
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "hi")]


def test_refusal_says_code_field_and_delay(server: tuple[str, Scripted]) -> None:
    with Client(server[0]) as client:
        with pytest.raises(RequestFailed) as caught:
            list(client.stream("bad"))
        error = caught.value
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (error.field, error.reason) == ("text", "RESOURCE_EXHAUSTED")
        assert error.retry_after_s == 2.0
        assert not client.abort("unknown")


def test_leaving_a_stream_cancels_it(server: tuple[str, Scripted]) -> None:
    with Client(server[0]) as client:
        stream = client.stream("x")
        assert next(stream).text == "Hel"
        stream.close()
        assert client.generate("x")[0].text == "Hello"
