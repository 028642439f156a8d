"""Spans, as an exporter gets them, and the caller's trace on its way to the planner."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from moelens.v1 import gateway_pb2 as messages
from moelens.v1 import planner_pb2
from moelens.v1.common_pb2 import SamplingParams
from moelens.v1.planner_pb2_grpc import PlannerServicer, add_PlannerServicer_to_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.spans import FLUSH_TIMEOUT_S, Spans, resource
from gateway.stack_options import StackOptions
from gateway.tracing import NoTracing, tracing
from tests.gateway.conftest import House, MakeHouse
from tests.gateway.fakes import FakeWorker

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Planner(PlannerServicer):
    """Admits everybody and remembers what came with the question."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []

    async def Admit(self, request, context):  # type: ignore[no-untyped-def]
        self.metadata.append(dict(context.invocation_metadata()))
        return planner_pb2.AdmitResponse(admitted=True)


def traced(
    house: MakeHouse, main: Callable[[House], Awaitable[None]], on: bool = True, **settings: object
) -> tuple[tuple[ReadableSpan, ...], Planner]:
    """Run `main` in a house with a planner; returns the spans that were exported."""
    exporter, planner = InMemorySpanExporter(), Planner()

    async def inside() -> None:
        async with house(**settings) as h:
            if on:
                provider = TracerProvider()
                provider.add_span_processor(SimpleSpanProcessor(exporter))
                h.gateway.service.tracing = Spans(provider)
            server = grpc.aio.server()
            add_PlannerServicer_to_server(planner, server)
            server.add_insecure_port(h.gateway.config.planner)
            await server.start()
            try:
                await main(h)
            finally:
                await server.stop(0)
            h.check_all_free()

    asyncio.run(inside())
    return exporter.get_finished_spans(), planner


def request(**fields: object) -> messages.GenerateRequest:
    fields.setdefault("token_ids", messages.TokenIds(ids=[5, 6, 7]))
    return messages.GenerateRequest(max_tokens=6, **fields)  # type: ignore[arg-type]


def test_a_request_is_a_span_with_what_it_asked_and_got(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        sampling = SamplingParams(temperature=0.5, seed=7, top_k=3)
        await h.collect(request(request_id="mine", n=2, sampling=sampling))

    (span,), _ = traced(house, main)
    attributes = dict(span.attributes or {})
    assert span.name == "text_completion model"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert attributes.pop("gen_ai.latency.time_to_first_token") > 0
    assert attributes.pop("gen_ai.latency.time_in_queue") >= 0
    assert attributes.pop("gen_ai.latency.e2e") > 0
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "moe_lens",
        "gen_ai.request.model": "model",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.top_k": 3,
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "model",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 12,
        "moe_lens.preemptions": 0,
    }
    assert [event.name for event in span.events] == ["first token"]
    assert span.status.status_code is StatusCode.UNSET


def test_chat_is_named_chat_and_no_content_is_recorded(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        turn = messages.ChatMessage(role="user", content="a secret")
        chat = messages.GenerateRequest(chat=messages.Chat(messages=[turn]), max_tokens=2)
        await h.collect(chat)

    (span,), _ = traced(house, main)
    assert span.name == "chat model"
    assert "secret" not in span.to_json()


def test_the_callers_trace_goes_on_through_the_span_to_the_planner(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        await h.collect(request(), metadata=(("traceparent", TRACEPARENT), ("tracestate", "a=b")))

    (span,), planner = traced(house, main)
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    (metadata,) = planner.metadata
    assert metadata["traceparent"] == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert metadata["tracestate"] == "a=b"


def test_without_opentelemetry_the_planner_gets_the_callers_own_trace(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        metadata = (("traceparent", TRACEPARENT), ("authorization", "Bearer not-for-the-planner"))
        await h.collect(request(), metadata=metadata)
        await h.collect(request())

    spans, planner = traced(house, main, on=False)
    assert spans == ()
    assert [entry.get("traceparent") for entry in planner.metadata] == [TRACEPARENT, None]
    assert all("authorization" not in entry for entry in planner.metadata)


def test_a_refusal_is_an_error_that_names_the_field(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await h.collect(request(n=0))

    (span,), _ = traced(house, main)
    assert span.status.status_code is StatusCode.ERROR
    assert "n" in (span.status.description or "").split()
    assert (span.attributes or {})["error.type"] == "INVALID_ARGUMENT"


def test_a_client_that_leaves_ends_its_span_with_the_tokens_so_far(house: MakeHouse) -> None:
    async def main(h: House) -> None:
        call = h.stub.Generate(messages.GenerateRequest(text="x", max_tokens=1000))
        async for event in call:
            if event.WhichOneof("event") == "tokens":
                break
        call.cancel()
        async with asyncio.timeout(10):
            await h.gateway.engine.until_idle()
        await asyncio.sleep(0.05)

    (span,), _ = traced(house, main, worker=FakeWorker(step_s=0.01))
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "CANCELLED"
    assert 1 <= attributes["gen_ai.usage.output_tokens"] < 1000
    assert "gen_ai.response.finish_reasons" not in attributes


def test_switched_off_it_is_not_even_imported() -> None:
    with tracing(False) as found:
        assert isinstance(found, NoTracing)
    code = "import sys, gateway.server; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_standard_variables_name_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resource().attributes["service.name"] == "moe-lens"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "rack=7")
    attributes = resource().attributes
    assert (attributes["service.name"], attributes["rack"]) == ("mine", "7")


def test_a_collector_that_cannot_be_reached_does_not_hold_up_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as silent:  # accepts, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with tracing(True) as spans:
            message = messages.GenerateRequest(text="x")
            with spans.request(message, "model", ()):
                pass
            begin_s = time.monotonic()
    # Left to itself, the exporter would try for 10 s.
    assert time.monotonic() - begin_s < FLUSH_TIMEOUT_S + 5


class Collector(TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request, context):  # type: ignore[no-untyped-def]
        for resource_spans in request.resource_spans:
            for scope in resource_spans.scope_spans:
                self.names += [span.name for span in scope.spans]
        return ExportTraceServiceResponse()


def test_the_last_spans_reach_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    try:
        with (
            tracing(True) as spans,
            spans.request(messages.GenerateRequest(text="x"), "demo", ()),
        ):
            pass
    finally:
        server.stop(0)
    assert collector.names == ["text_completion demo"]


@pytest.mark.parametrize(
    ("otel", "flags"), [(True, ("--otel",)), (False, ("--no-otel",)), (None, None)]
)
def test_up_tells_the_gateway(otel: bool | None, flags: tuple[str, ...] | None) -> None:
    assert StackOptions(otel=otel).stack(Path("m"), None, True).options.get("gateway") == flags


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")],
)
def test_what_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable), tracing(True):
        pass
