"""Errors that the native part raises."""

from __future__ import annotations


class NativeError(Exception):
    """Base of every error raised by `native`."""


class InvalidArgumentError(NativeError, ValueError):
    """An argument is wrong; the text names it and says what would be right."""


class NotBuiltError(NativeError, ImportError):
    """A C extension has not been built; the text is the command that builds it."""

    def __init__(self, extension: str) -> None:
        super().__init__(f"native.{extension} is not built; build it with `make build-native`")
