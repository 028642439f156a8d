"""A span of OpenTelemetry for each request, with the attributes that it names for generative AI.

Prompts and outputs are never recorded. Needs the extra `otel`; see gateway.tracing for the rest.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from moelens.v1 import gateway_pb2 as messages
from opentelemetry import propagate
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from gateway.tracing import Metadata
from gateway.validation import CheckedRequest
from protos.errors import ServiceError

REASONS = {
    messages.FINISH_REASON_STOP: "stop",
    messages.FINISH_REASON_LENGTH: "length",
}
FLUSH_TIMEOUT_S = 2.0  # for the last spans, at the end
MAX_NAME_CHARACTERS = 256  # of a model's name before validation has seen it
# Attribute → field of SamplingParams, where the caller gave it.
SAMPLING = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.seed": "seed",
}
# The same for fields that have no presence: 0 is their default.
SAMPLING_UNLESS_ZERO = {
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
}


class Spans:
    """Makes the spans of one gateway; see gateway.tracing.Tracing."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("moe-lens", version("moe-lens"))

    @contextmanager
    def request(
        self, message: messages.GenerateRequest, model: str, metadata: Metadata
    ) -> Iterator["RequestSpan"]:
        """The span begins, as a child of the caller's if that sent its `traceparent`."""
        operation = "chat" if message.WhichOneof("prompt") == "chat" else "text_completion"
        # Not made the current span: that would be the context of whoever reads the stream.
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=propagate.extract(dict(metadata)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "moe_lens",
                "gen_ai.request.model": message.model[:MAX_NAME_CHARACTERS] or model,
                **_sampling(message),
            },
        )
        try:
            yield RequestSpan(span, model)
        except ServiceError as error:
            span.set_attribute("error.type", error.code.name)
            span.set_status(Status(StatusCode.ERROR, f"{error.reason} {error.field}".strip()))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            span.set_attribute("error.type", "CANCELLED")
            raise
        except BaseException:
            span.set_attribute("error.type", "INTERNAL")
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.end()


class RequestSpan:
    """One request's span."""

    def __init__(self, span: Span, model: str) -> None:
        self._span = span
        self._model = model
        self._begin_s = time.monotonic()
        self._first = True
        self._output_tokens = 0
        self._reasons: dict[int, str] = {}
        self._preemptions = 0

    @property
    def metadata(self) -> Metadata:
        """Trace context of this span."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(self._span))
        return tuple(carrier.items())

    def checked(self, request: CheckedRequest) -> None:
        """What validation made of it."""
        self._span.set_attributes(
            {
                "gen_ai.response.id": request.request_id,
                "gen_ai.response.model": self._model,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.choice.count": request.outputs,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
            }
        )

    def sent(self, event: messages.GenerateResponse) -> None:
        """Counts tokens, and sums up as outputs finish: a request that ends early says how far."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            self._output_tokens += len(event.tokens.token_ids)
            self._span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
            if self._first:
                self._first = False
                self._span.add_event("first token")
                waited_s = time.monotonic() - self._begin_s
                self._span.set_attribute("gen_ai.latency.time_to_first_token", waited_s)
        elif kind == "finished":
            self._finished(event.finished)

    def _finished(self, finished: messages.Finished) -> None:
        self._reasons[finished.index] = REASONS[finished.reason]
        self._preemptions += finished.preemptions
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.set_attribute("gen_ai.latency.time_in_queue", finished.queue_s)
        self._span.set_attribute("gen_ai.latency.e2e", time.monotonic() - self._begin_s)
        self._span.set_attribute("moe_lens.preemptions", self._preemptions)


@contextmanager
def exported_spans() -> Iterator[Spans]:
    """Spans that go where the OTEL_ variables say; the last ones leave at the end.

    Sampler, limits and the exporter's own settings are read by the SDK. Raises ValueError for an
    exporter or a protocol that is not there.
    """
    exporter = _exporter(os.environ.get("OTEL_TRACES_EXPORTER") or "otlp")
    provider = TracerProvider(resource=resource())
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Spans(provider)
    finally:
        _shut_down(provider, exporter)


def resource() -> Resource:
    """What this process is called, and what OTEL_RESOURCE_ATTRIBUTES adds."""
    named = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or "moe-lens"}
    return Resource.create({**named, SERVICE_VERSION: version("moe-lens")})


def _shut_down(provider: TracerProvider, exporter: SpanExporter | None) -> None:
    """A collector that nobody reaches must not hold up the stop: the exporter would try for long,
    unless it is shut down itself."""
    if exporter is None:
        provider.shutdown()
        return
    giving_up = threading.Timer(FLUSH_TIMEOUT_S, exporter.shutdown)
    giving_up.start()
    try:
        provider.shutdown()
    finally:
        giving_up.cancel()


def _exporter(name: str) -> SpanExporter | None:
    if name == "none":
        return None
    if name == "console":
        return ConsoleSpanExporter()
    if name != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER is {name!r}; expected otlp, console or none")
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general
    if protocol != "grpc":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; this exporter speaks grpc")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _sampling(message: messages.GenerateRequest) -> dict[str, float]:
    params = message.sampling
    given = {key: name for key, name in SAMPLING.items() if params.HasField(name)}
    given |= {key: name for key, name in SAMPLING_UNLESS_ZERO.items() if getattr(params, name)}
    return {key: getattr(params, name) for key, name in given.items()}
