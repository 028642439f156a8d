"""Why a session with the GPU worker ended, and what follows from it."""

import enum

import grpc

from protos.errors import decode_failure


class SessionEnded(Exception):
    """The session with the GPU worker is over; all KV is lost."""


class Cause(enum.Enum):
    """What a failure is put down to."""

    LOSS = "loss"  # a process died or hangs, a connection broke
    STEP = "step"  # the worker lives and says that a step failed
    MEMORY = "memory"  # of the device: a smaller step may pass


def cause_of(error: Exception) -> Cause:
    """Of what ended a session."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return Cause.LOSS
    failure = decode_failure(error)
    if failure.reason == "OUT_OF_MEMORY":
        return Cause.MEMORY
    # Without details it comes from the transport, which says INTERNAL too.
    return Cause.STEP if failure.reason == "STEP_FAILED" else Cause.LOSS


def text_of(error: Exception) -> str:
    """For the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
