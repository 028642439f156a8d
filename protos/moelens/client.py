"""A small client of the gateway, asynchronous and not.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("To be, or not", max_tokens=32)[0].text)
        for event in client.stream("To be, or not"):
            print(event.text, end="")

    async with AsyncClient("unix:/run/moe-lens/gateway.sock") as client:
        answers = await client.generate([{"role": "user", "content": "Who's there?"}], n=2)

A prompt is a text, token ids, or chat messages. Options are those of GenerateRequest and
SamplingParams by name; see `Options`. A failed call raises `RequestFailed`.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.common_pb2 import TokenLogprobs
from moelens.v1.gateway_pb2_grpc import GatewayStub

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

MAX_MESSAGE_BYTES = 64 * 2**20
_REASONS = {
    messages.FINISH_REASON_STOP: "stop",
    messages.FINISH_REASON_LENGTH: "length",
}


class Options(TypedDict, total=False):
    """What a request may say besides its prompt; gateway.proto and common.proto explain each."""

    request_id: str
    model: str
    max_tokens: int
    stop: Sequence[str]
    include_stop: bool
    n: int
    echo: bool
    batch: bool  # priority of batch work
    keep_special_tokens: bool
    no_special_tokens: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int


_REQUEST_FIELDS = frozenset(messages.GenerateRequest.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True)
class Security:
    """PEM files and a bearer token; all None: no TLS, no token."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What accompanies each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Raises OSError when a file cannot be read."""
        if self.ca is None and self.certificate is None:
            return None
        files = [
            path.read_bytes() if path else None for path in (self.ca, self.key, self.certificate)
        ]
        return grpc.ssl_channel_credentials(*files)


class RequestFailed(Exception):
    """A call that the server refused or could not finish."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code: grpc.StatusCode = error.code()
        self.message: str = error.details() or ""
        self.field = ""  # of the request that is to blame, as a path
        self.reason = ""  # stable name
        self.retry_after_s: float | None = None
        super().__init__(f"{self.code.name}: {self.message}")
        trailing: Any = error.trailing_metadata()
        for key, value in trailing or ():
            if key == "grpc-status-details-bin":
                self._read(Status.FromString(value))

    def _read(self, status: Status) -> None:
        info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(bad)
            if detail.Unpack(retry):
                self.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        self.reason = info.reason
        if bad.field_violations:
            self.field = bad.field_violations[0].field


@dataclass(frozen=True)
class Event:
    """A piece of output `index`; the last of each has a finish_reason."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop" or "length"
    finished: messages.Finished | None = None


@dataclass
class Completion:
    """One whole output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    request_id: str = ""
    seed: int = 0
    prompt: messages.PromptReport | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0


def request(prompt: Prompt, **options: Unpack[Options]) -> messages.GenerateRequest:
    """The message for a prompt with options. TypeError for an option that does not exist."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    values: dict[str, Any] = dict(options)
    if values.pop("batch", False):
        values["priority"] = messages.PRIORITY_BATCH
    sampling = {name: values.pop(name) for name in list(values) if name not in _REQUEST_FIELDS}
    message = messages.GenerateRequest(**values)
    message.sampling.SetInParent()
    for name, value in sampling.items():
        if isinstance(value, Mapping):
            getattr(message.sampling, name).update(value)
        elif isinstance(value, Sequence):
            getattr(message.sampling, name).extend(value)
        else:
            setattr(message.sampling, name, value)
    _set_prompt(message, prompt)
    return message


def _set_prompt(message: messages.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        message.chat.messages.extend(messages.ChatMessage(**turn) for turn in prompt)  # type: ignore[arg-type]
    else:
        message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]


class Collector:
    """Puts the events of one stream together."""

    def __init__(self) -> None:
        self.started = messages.Started()
        self.prompt: messages.PromptReport | None = None
        self._completions: dict[int, Completion] = {}

    @property
    def completions(self) -> list[Completion]:
        """The outputs so far, by index."""
        return [self._completions[index] for index in sorted(self._completions)]

    def add(self, response: messages.GenerateResponse) -> Event | None:
        """Take one message; returns the event that it is, None for those that only inform."""
        kind = response.WhichOneof("event")
        if kind == "tokens":
            return self._tokens(response.tokens)
        if kind == "finished":
            return self._finished(response.finished)
        if kind == "started":
            self.started = response.started
        elif kind == "prompt":
            self.prompt = response.prompt
        return None

    def _completion(self, index: int) -> Completion:
        if index not in self._completions:
            started = self.started
            self._completions[index] = Completion(
                index, request_id=started.request_id, seed=started.seed, prompt=self.prompt
            )
        return self._completions[index]

    def _tokens(self, tokens: messages.Tokens) -> Event:
        completion = self._completion(tokens.index)
        completion.text += tokens.text
        completion.token_ids.extend(tokens.token_ids)
        completion.logprobs.extend(tokens.logprobs)
        return Event(tokens.index, tokens.text, tuple(tokens.token_ids), tuple(tokens.logprobs))

    def _finished(self, finished: messages.Finished) -> Event:
        completion = self._completion(finished.index)
        completion.finish_reason = _REASONS.get(finished.reason, "")
        completion.prompt_tokens = finished.prompt_tokens
        completion.generated_tokens = finished.generated_tokens
        completion.first_token_s = finished.first_token_s
        completion.total_s = finished.total_s
        return Event(finished.index, finish_reason=completion.finish_reason, finished=finished)


def _options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]


class AsyncClient:
    """For asyncio; `async with`, or call `close()`."""

    def __init__(self, server: str, security: Security | None = None) -> None:
        """`server` is unix:/path or host:port."""
        self._security = security or Security()
        credentials = self._security.credentials
        self.channel = (
            grpc.aio.secure_channel(server, credentials, _options())
            if credentials
            else grpc.aio.insecure_channel(server, _options())
        )
        self.stub = GatewayStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls."""
        await self.channel.close(None)

    async def responses(
        self, message: messages.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[messages.GenerateResponse]:
        """The raw messages of one Generate call; leaving the loop cancels it."""
        call = self.stub.Generate(message, timeout=timeout_s, metadata=self._security.metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error) from error
        finally:
            call.cancel()

    async def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Event]:
        """Events as they come."""
        collector = Collector()
        async for response in self.responses(request(prompt, **options), timeout_s):
            event = collector.add(response)
            if event is not None:
                yield event

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> list[Completion]:
        """All `n` outputs, complete."""
        collector = Collector()
        async for response in self.responses(request(prompt, **options), timeout_s):
            collector.add(response)
        return collector.completions

    async def tokenize(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        message = messages.TokenizeRequest(text=text, no_special_tokens=not special_tokens)
        return list((await self._unary(self.stub.Tokenize, message)).token_ids)

    async def detokenize(self, token_ids: Iterable[int]) -> str:
        """Text of token ids."""
        message = messages.DetokenizeRequest(token_ids=token_ids)
        return str((await self._unary(self.stub.Detokenize, message)).text)

    async def abort(self, request_id: str) -> bool:
        """End a running request; False when there is none of that id."""
        message = messages.AbortRequest(request_id=request_id)
        return bool((await self._unary(self.stub.Abort, message)).found)

    async def model(self) -> messages.GetModelResponse:
        """What is served."""
        answer: messages.GetModelResponse = await self._unary(
            self.stub.GetModel, messages.GetModelRequest()
        )
        return answer

    async def load(self) -> messages.GetLoadResponse:
        """How busy the server is."""
        answer: messages.GetLoadResponse = await self._unary(
            self.stub.GetLoad, messages.GetLoadRequest()
        )
        return answer

    async def _unary(self, method: Any, message: Any) -> Any:
        try:
            return await method(message, metadata=self._security.metadata)
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error) from error


class Client:
    """The same without asyncio; `with`, or call `close()`. Threads may share one."""

    def __init__(self, server: str, security: Security | None = None) -> None:
        """`server` is unix:/path or host:port."""
        self._security = security or Security()
        credentials = self._security.credentials
        self.channel = (
            grpc.secure_channel(server, credentials, _options())
            if credentials
            else grpc.insecure_channel(server, _options())
        )
        self.stub = GatewayStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls."""
        self.channel.close()

    def responses(
        self, message: messages.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[messages.GenerateResponse]:
        """The raw messages of one Generate call; leaving the loop cancels it."""
        call = self.stub.Generate(message, timeout=timeout_s, metadata=self._security.metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise RequestFailed(error) from error
        finally:
            call.cancel()

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Iterator[Event]:
        """Events as they come."""
        collector = Collector()
        for response in self.responses(request(prompt, **options), timeout_s):
            event = collector.add(response)
            if event is not None:
                yield event

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> list[Completion]:
        """All `n` outputs, complete."""
        collector = Collector()
        for response in self.responses(request(prompt, **options), timeout_s):
            collector.add(response)
        return collector.completions

    def tokenize(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        message = messages.TokenizeRequest(text=text, no_special_tokens=not special_tokens)
        return list(self._unary(self.stub.Tokenize, message).token_ids)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """Text of token ids."""
        message = messages.DetokenizeRequest(token_ids=token_ids)
        return str(self._unary(self.stub.Detokenize, message).text)

    def abort(self, request_id: str) -> bool:
        """End a running request; False when there is none of that id."""
        message = messages.AbortRequest(request_id=request_id)
        return bool(self._unary(self.stub.Abort, message).found)

    def model(self) -> messages.GetModelResponse:
        """What is served."""
        answer: messages.GetModelResponse = self._unary(
            self.stub.GetModel, messages.GetModelRequest()
        )
        return answer

    def load(self) -> messages.GetLoadResponse:
        """How busy the server is."""
        answer: messages.GetLoadResponse = self._unary(self.stub.GetLoad, messages.GetLoadRequest())
        return answer

    def _unary(self, method: Any, message: Any) -> Any:
        try:
            return method(message, metadata=self._security.metadata)
        except grpc.RpcError as error:
            raise RequestFailed(error) from error
