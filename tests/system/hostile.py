"""Malformed and hostile calls: name, how to make it, the status and field that it must get.

A call is a method and the bytes of its request, so that what no well-behaved client would send can
be sent too. Field None: the status has none (the transport refuses it before any field is read).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from moelens.v1 import gateway_pb2 as pb
from moelens.v1 import inference_pb2
from moelens.v1.common_pb2 import SamplingParams

Code = grpc.StatusCode
VOCABULARY = 4096
NAN, INFINITY = float("nan"), float("inf")
GENERATE = "moelens.v1.Gateway/Generate"


@dataclass(frozen=True)
class Hostile:
    """One call."""

    name: str
    method: str
    data: bytes
    code: Code
    field: str | None
    kind: str = "unary_stream"


def generate(
    name: str, field: str, code: Code = Code.INVALID_ARGUMENT, **values: object
) -> Hostile:
    """A Generate call that is wrong in one field."""
    message = pb.GenerateRequest(**{"text": "ROMEO:", "max_tokens": 4, **values})
    return Hostile(name, GENERATE, message.SerializeToString(), code, field)


def sampled(name: str, field: str, **values: object) -> Hostile:
    """The same in the sampling parameters."""
    return generate(name, f"sampling.{field}", sampling=SamplingParams(**values))


def unary(name: str, method: str, message: Message, code: Code, field: str) -> Hostile:
    """A call with one answer."""
    path = method if "/" in method else f"moelens.v1.Gateway/{method}"
    return Hostile(name, path, message.SerializeToString(), code, field, "unary_unary")


def submitted(name: str, field: str, **values: object) -> Hostile:
    """A batch that cannot be taken."""
    data = pb.SubmitBatchRequest(**values).SerializeToString()
    method = "moelens.v1.Gateway/SubmitBatch"
    return Hostile(name, method, data, Code.INVALID_ARGUMENT, field, "stream_unary")


def chat(*turns: tuple[str, str], arguments: str = "") -> pb.Chat:
    """Messages, and variables for the template."""
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.Chat(messages=messages, template_arguments_json=arguments)


def prompts() -> Iterator[Hostile]:
    """Prompts."""
    ids = pb.TokenIds
    none = pb.GenerateRequest(max_tokens=1).SerializeToString()
    yield Hostile("no prompt", GENERATE, none, Code.INVALID_ARGUMENT, "prompt")
    yield generate("empty text", "text", text="")
    yield generate("text beyond the context", "text", text="word " * 100_000)
    yield generate("9 MB of text", "text", Code.RESOURCE_EXHAUSTED, text="a" * 9_000_000)
    yield generate("no ids", "token_ids", token_ids=ids())
    yield generate("id beyond the vocabulary", "token_ids.ids", token_ids=ids(ids=[VOCABULARY]))
    yield generate("largest id", "token_ids.ids", token_ids=ids(ids=[1, 2**32 - 1]))
    yield generate("a million ids", "token_ids", token_ids=ids(ids=[1] * 1_000_000))
    yield generate("no messages", "chat", chat=chat())
    user = ("user", "x")
    where = "chat.template_arguments_json"
    yield generate("arguments that are no JSON", where, chat=chat(user, arguments="{"))
    yield generate("arguments that are no object", where, chat=chat(user, arguments="[]"))
    yield generate("deep arguments", where, chat=chat(user, arguments="[" * 100_000))


def limits() -> Iterator[Hostile]:
    """Counts and sizes."""
    yield generate("no tokens to generate", "max_tokens", max_tokens=0)
    yield generate("more tokens than the context", "max_tokens", max_tokens=10**6)
    yield generate("largest max_tokens", "max_tokens", max_tokens=2**32 - 1)
    yield generate("n of zero", "n", n=0)
    yield generate("n beyond the limit", "n", n=65)
    yield generate("largest n", "n", n=2**32 - 1)
    yield generate("empty stop", "stop", stop=[""])
    yield generate("long stop", "stop", stop=["x" * 5000])
    yield generate("many stops", "stop", stop=["x"] * 17)
    yield generate("unknown priority", "priority", priority=77)
    yield generate("long request id", "request_id", request_id="x" * 300)
    yield generate("another model", "model", Code.NOT_FOUND, model="gpt-5")
    yield generate("a path as model", "model", Code.NOT_FOUND, model="../../etc/passwd")
    yield generate("a megabyte of model name", "model", Code.NOT_FOUND, model="m" * 1_000_000)


def sampling() -> Iterator[Hostile]:
    """Sampling parameters."""
    for value in (NAN, INFINITY, -INFINITY, -0.5):
        yield sampled(f"temperature {value}", "temperature", temperature=value)
    for value in (0.0, 1.5, NAN, -1.0):
        yield sampled(f"top_p {value}", "top_p", top_p=value)
    for value in (-0.1, 1.1, NAN):
        yield sampled(f"min_p {value}", "min_p", min_p=value)
    for value in (2.1, -2.1, NAN):
        yield sampled(f"frequency_penalty {value}", "frequency_penalty", frequency_penalty=value)
    yield sampled("presence_penalty", "presence_penalty", presence_penalty=INFINITY)
    for value in (0.0, -1.0, NAN, INFINITY):
        yield sampled(f"repetition {value}", "repetition_penalty", repetition_penalty=value)
    yield sampled("many logprobs", "logprobs", logprobs=10_000)
    yield sampled("many prompt logprobs", "prompt_logprobs", prompt_logprobs=2**32 - 1)
    yield sampled("stop id", "stop_token_ids", stop_token_ids=[VOCABULARY])
    yield sampled("many stop ids", "stop_token_ids", stop_token_ids=[1] * 300)
    yield sampled("bias of no token", "logit_bias", logit_bias={VOCABULARY: 1.0})
    yield sampled("bias of NaN", "logit_bias", logit_bias={1: NAN})
    yield sampled("large bias", "logit_bias", logit_bias={1: 1e30})
    yield sampled("min beyond max", "min_tokens", min_tokens=10_000)


def other_calls() -> Iterator[Hostile]:
    """Everything but Generate."""
    bad, absent = Code.INVALID_ARGUMENT, Code.NOT_FOUND
    yield unary("tokenize nothing", "Tokenize", pb.TokenizeRequest(), bad, "prompt")
    yield unary("tokenize empty", "Tokenize", pb.TokenizeRequest(text=""), bad, "text")
    ids = pb.DetokenizeRequest(token_ids=[VOCABULARY])
    yield unary("detokenize no token", "Detokenize", ids, bad, "token_ids")
    yield unary("another model", "GetModel", pb.GetModelRequest(model="x"), absent, "model")
    yield unary("no such batch", "GetBatch", pb.GetBatchRequest(batch_id="x"), absent, "batch_id")
    traversal = pb.CancelBatchRequest(batch_id="../../../etc")
    yield unary("a path as batch", "CancelBatch", traversal, absent, "batch_id")
    watch = pb.WatchBatchRequest(batch_id="x", records=True).SerializeToString()
    yield Hostile("watch nothing", "moelens.v1.Gateway/WatchBatch", watch, absent, "batch_id")
    yield submitted("batch without rows", "jsonl")
    yield submitted("batch named by a path", "batch_id", batch_id="../x", jsonl=b"{}")
    yield submitted("batch with a long name", "batch_id", batch_id="x" * 99, jsonl=b"{}")
    model = inference_pb2.ModelReadyRequest(name="x")
    yield unary("probe", "inference.GRPCInferenceService/ModelReady", model, absent, "name")


def transport() -> Iterator[Hostile]:
    """What no stub would send."""
    yield Hostile("bytes that are no message", GENERATE, b"\xff" * 64, Code.INVALID_ARGUMENT, None)
    yield Hostile("a cut message", GENERATE, b"\x1a\x7fRO", Code.INVALID_ARGUMENT, None)
    yield Hostile(
        "text that is no UTF-8", GENERATE, b"\x1a\x02\xff\xfe", Code.INVALID_ARGUMENT, None
    )
    yield Hostile("deep nesting", GENERATE, b"\x2b" * 200, Code.INVALID_ARGUMENT, None)
    no = Code.UNIMPLEMENTED
    yield Hostile("no such method", "moelens.v1.Gateway/Format", b"", no, None)
    yield Hostile("no such service", "moelens.v1.Admin/Shutdown", b"", no, None)
    huge = json.dumps({"text": "a" * (17 * 2**20)}).encode()
    yield Hostile("a message beyond the limit", GENERATE, huge, Code.RESOURCE_EXHAUSTED, None)


def everything() -> list[Hostile]:
    """All of them; names are unique."""
    return [*prompts(), *limits(), *sampling(), *other_calls(), *transport()]
