"""Errors survive the wire with everything that they say."""

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from protos import errors
from protos.environment import check_environment

CLASSES = [
    errors.InvalidArgument,
    errors.NotFound,
    errors.AlreadyExists,
    errors.ResourceExhausted,
    errors.FailedPrecondition,
    errors.Unavailable,
    errors.Aborted,
    errors.Cancelled,
    errors.DeadlineExceeded,
    errors.Unauthenticated,
    errors.DataLoss,
]


class Failed(grpc.RpcError):
    """A failed call as a client sees it."""

    def __init__(self, error: errors.ServiceError, packed: bytes | None) -> None:
        self._error, self._packed = error, packed

    def code(self) -> grpc.StatusCode:
        return self._error.code

    def details(self) -> str:
        return str(self._error)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...] | None:
        return None if self._packed is None else ((errors.DETAILS_KEY, self._packed),)


@pytest.mark.parametrize("kind", CLASSES)
def test_field_reason_delay_and_details_come_back(kind: type[errors.ServiceError]) -> None:
    error = kind(
        "is wrong",
        field="a.b",
        reason="SO_WRONG",
        retry_after_s=1.25,
        details=[StringValue(value="more")],
    )
    failure = errors.decode_failure(Failed(error, errors.status_details(error)))
    assert failure.code is kind.code
    assert failure.message == "a.b: is wrong"
    assert (failure.field, failure.reason, failure.retry_after_s) == ("a.b", "SO_WRONG", 1.25)
    more = StringValue()
    assert any(detail.Unpack(more) for detail in failure.details)
    assert more.value == "more"


def test_codes_and_reasons_are_all_different() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)
    assert len({kind("x").reason for kind in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("packed", [None, b"", b"\xff\xff\xff"])
def test_answers_of_strangers_are_read_as_far_as_they_go(packed: bytes | None) -> None:
    failure = errors.decode_failure(Failed(errors.NotFound("gone"), packed))
    assert (failure.code, failure.message) == (grpc.StatusCode.NOT_FOUND, "gone")
    assert (failure.field, failure.retry_after_s) == ("", None)


def test_variables_that_nobody_reads_are_named_with_the_nearest() -> None:
    check_environment(["PATH", "MOE_LENS_MODEL", "MOE_LENS_ISA"])
    with pytest.raises(ValueError, match="MOE_LENS_MODLE; did you mean MOE_LENS_MODEL"):
        check_environment(["MOE_LENS_MODLE"])
    with pytest.raises(ValueError, match=r"MOE_LENS_QQQQQQQQ$"):
        check_environment(["MOE_LENS_QQQQQQQQ"])
