"""Errors that cross the wire: one exception class per status code, and how each is encoded.

A service raises a `ServiceError`; `protos.calls` turns it into a status with google.rpc details:
`BadRequest` names the field, `RetryInfo` says when to come back, `ErrorInfo` a stable reason.
Anything else that escapes a service is a bug and becomes INTERNAL.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

DOMAIN = "moe-lens"
DETAILS_KEY = "grpc-status-details-bin"
# What a caller may see of a bug; the log has the rest.
BUG_MESSAGE = "internal error; the server's log has the details"


class ServiceError(Exception):
    """A failure that the caller is told about, as `field: message` where one field is to blame.

    `reason` is a stable upper-case name for programs; `retry_after_s` says when trying again makes
    sense (None: not at all, or unknown); `details` are further messages to attach.
    """

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        reason: str = "",
        retry_after_s: float | None = None,
        details: Sequence[Message] = (),
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.reason = reason or self.default_reason
        self.retry_after_s = retry_after_s
        self.details = tuple(details)


class InvalidArgument(ServiceError):
    """The request is wrong whatever the state of the service; retrying it cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class NotFound(ServiceError):
    """The thing that the field names does not exist here."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    """The id is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class ResourceExhausted(ServiceError):
    """A limit is reached: one that will pass when `retry_after_s` is set, else for good."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class FailedPrecondition(ServiceError):
    """The service is not in a state for this call; another call has to come first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class Unavailable(ServiceError):
    """A part of the system is missing just now (loading, restarting, stopping); retry later."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class Aborted(ServiceError):
    """A newer call took this one's place."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class Cancelled(ServiceError):
    """Somebody else ended this request on purpose."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class DeadlineExceeded(ServiceError):
    """The caller's deadline passed before the work was done."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Unimplemented(ServiceError):
    """This server does not offer the call."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class Unauthenticated(ServiceError):
    """No credentials, or wrong ones."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class DataLoss(ServiceError):
    """The model's numbers for this request are unusable (not finite)."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


def status_details(error: ServiceError) -> bytes:
    """The serialised google.rpc.Status that travels in the trailing metadata."""
    status = Status(code=error.code.value[0], message=str(error))
    messages: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.field:
        violation = BadRequest.FieldViolation(field=error.field, description=error.message)
        messages.append(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(max(error.retry_after_s, 0.0) * 1e9))
        messages.append(retry)
    for message in (*messages, *error.details):
        status.details.add().Pack(message)
    return bytes(status.SerializeToString())


@dataclass(frozen=True)
class Failure:
    """What a client learns from a failed call."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    reason: str = ""
    retry_after_s: float | None = None
    details: tuple[any_pb2.Any, ...] = ()


def decode_failure(error: grpc.RpcError) -> Failure:
    """Read the code, message, field and retry advice of a failed call (grpc or grpc.aio)."""
    trailing: Iterable[tuple[str, str | bytes]] = cast(Any, error.trailing_metadata()) or ()
    packed = next((value for key, value in trailing if key == DETAILS_KEY), None)
    message = error.details() or ""
    if not isinstance(packed, bytes):
        return Failure(error.code(), message)
    try:
        status = Status.FromString(packed)
    except DecodeError:
        return Failure(error.code(), message)
    return _with_details(error.code(), message, tuple(status.details))


def _with_details(code: grpc.StatusCode, message: str, details: tuple[any_pb2.Any, ...]) -> Failure:
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    retry_after_s = None
    for detail in details:
        detail.Unpack(info) or detail.Unpack(bad)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    field = bad.field_violations[0].field if bad.field_violations else ""
    return Failure(code, message, field, info.reason, retry_after_s, details)
