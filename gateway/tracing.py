"""What tracing systems are told about requests: nothing, unless OpenTelemetry is switched on.

The caller's trace context (W3C `traceparent` and `tracestate`) goes on to the planner either way.
The GPU worker gets none: its steps belong to many requests at once.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from moelens.v1 import gateway_pb2 as messages

from gateway.validation import CheckedRequest

Metadata = tuple[tuple[str, str], ...]

CONTEXT_KEYS = ("traceparent", "tracestate")


class RequestTrace(Protocol):
    """One request, as it is told."""

    @property
    def metadata(self) -> Metadata:
        """The trace context for calls made on the request's behalf."""

    def checked(self, request: CheckedRequest) -> None:
        """The request is a good one."""

    def sent(self, event: messages.GenerateResponse) -> None:
        """The client gets this."""


class Tracing(Protocol):
    """Tells of requests while they run."""

    def request(
        self, message: messages.GenerateRequest, model: str, metadata: Metadata
    ) -> AbstractContextManager[RequestTrace]:
        """Around one request for `model` whose call came with `metadata`."""


class Untold:
    """A request that nobody is told of."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = trace_context(metadata)

    def checked(self, request: CheckedRequest) -> None:
        """Nothing."""

    def sent(self, event: messages.GenerateResponse) -> None:
        """Nothing."""


class NoTracing:
    """Carries the caller's trace on and tells nobody."""

    @contextmanager
    def request(
        self, message: messages.GenerateRequest, model: str, metadata: Metadata
    ) -> Iterator[RequestTrace]:
        """See Tracing."""
        yield Untold(metadata)


def trace_context(metadata: Metadata) -> Metadata:
    """What of a call's metadata is its trace context."""
    return tuple(pair for pair in metadata if pair[0] in CONTEXT_KEYS)


def texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """The entries of a call's metadata that are text."""
    return tuple((key, value) for key, value in metadata or () if isinstance(value, str))


@contextmanager
def tracing(switched_on: bool) -> Iterator[Tracing]:
    """OpenTelemetry as the OTEL_ variables say, if `switched_on`; its last spans leave at the end.

    Raises ValueError when it is not installed, or for a variable that asks for what is not there.
    """
    if not switched_on:
        yield NoTracing()
        return
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ValueError("otel needs OpenTelemetry: pip install 'moe-lens[otel]'")
    from gateway.spans import exported_spans

    with exported_spans() as spans:
        yield spans
