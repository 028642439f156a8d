"""Around every call of our services: errors become statuses, calls in flight are counted."""

import asyncio
import contextlib
import contextvars
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from protos import errors
from protos.access import Access

log = structlog.get_logger("calls")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: A client that takes nothing for so long loses its stream.
SLOW_CLIENT_S = 60.0


@dataclass(frozen=True)
class Caller:
    """Who made the present call."""

    name: str = ""  # of its token, where one is asked for
    deadline_s: float | None = None  # by time.monotonic(); None: it waits as long as it takes


NOBODY = Caller()
caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=NOBODY)


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Interceptor over the services named; health and reflection pass it by.

    `in_flight` counts the calls being answered; `idle` is set while there is none. While `closed`
    holds a reason, new calls are refused with UNAVAILABLE.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        access: Access | None = None,
        slow_client_s: float = SLOW_CLIENT_S,
    ) -> None:
        self._access = access
        self._slow_client_s = slow_client_s
        self._prefixes = tuple(f"/{name}/" for name in service_names)
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.closed = ""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler of one call of ours."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefixes):
            return handler
        return self._wrapped(handler, method)

    def _wrapped(self, handler: Any, method: str) -> Handler:
        behaviour = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        read = _reader(handler)

        async def answer(data: Any, context: Context) -> Any:
            async with self._call(method, context):
                return await behaviour(read(data), context)

        async def stream(data: Any, context: Context) -> None:
            # Closed here rather than by the garbage collector: a client that left frees at once
            # what its call holds.
            async with (
                self._call(method, context),
                contextlib.aclosing(behaviour(read(data), context)) as responses,
            ):
                async for response in responses:
                    await self._write(context, response)

        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        return make(
            stream if inspect.isasyncgenfunction(behaviour) else answer,
            request_deserializer=None,  # by `read`: what is no message is the caller's fault
            response_serializer=handler.response_serializer,
        )

    async def _write(self, context: Context, response: Any) -> None:
        """Waits as long as the client's window is full. ResourceExhausted when that never ends."""
        try:
            async with asyncio.timeout(self._slow_client_s):
                await context.write(response)
        except TimeoutError as error:
            raise errors.ResourceExhausted(
                f"the client has not read its stream for {self._slow_client_s:g} s",
                reason="SLOW_CLIENT",
            ) from error

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[None]:
        self._enter()
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(method=method, call=uuid.uuid4().hex[:12])
        try:
            if self.closed:
                raise errors.Unavailable(self.closed, reason="STOPPING")
            with self._admitted(context):
                yield
        except errors.ServiceError as error:
            # That a service is not ready yet is no event: callers ask until it is.
            tell = log.debug if error.code is grpc.StatusCode.UNAVAILABLE else log.info
            tell("call failed", code=error.code.name, error=str(error), reason=error.reason)
            await _abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("bug")
            await _abort(context, errors.ServiceError(errors.BUG_MESSAGE))
        finally:
            self._leave()

    @contextlib.contextmanager
    def _admitted(self, context: Context) -> Iterator[None]:
        left_s = context.time_remaining()
        deadline_s = None if left_s is None else time.monotonic() + left_s
        if self._access is None:
            caller.set(Caller("", deadline_s))
            yield
            return
        metadata: Any = context.invocation_metadata() or ()
        with self._access.call(metadata) as client:
            structlog.contextvars.bind_contextvars(client=client)
            caller.set(Caller(client, deadline_s))
            yield

    def _enter(self) -> None:
        self.in_flight += 1
        self.idle.clear()

    def _leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()


_HANDLERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _reader(handler: Any) -> Callable[[Any], Any]:
    """Turns the bytes of a request, or of each request of a stream, into messages. Bytes that are
    no message would be INTERNAL to the library; they are InvalidArgument."""

    def message(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except (DecodeError, ValueError) as error:
            raise errors.InvalidArgument(
                "the bytes sent are not a message of this call", reason="MALFORMED_MESSAGE"
            ) from error

    async def messages(data: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for entry in data:
            yield message(entry)

    return messages if handler.request_streaming else message


async def _abort(context: Context, error: errors.ServiceError) -> None:
    metadata = ((errors.DETAILS_KEY, errors.status_details(error)),)
    await context.abort(error.code, str(error), metadata)
