"""The output file: one JSON record a line, written so that a kill at any moment loses nothing.

A record counts as written once its newline is on the disk (append, then fsync of everything that
finished since the last one). What a kill leaves of an unfinished line is cut off on the next open.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any


class OutputInUse(Exception):
    """Another process writes to this file."""


class OutputCorrupt(Exception):
    """The file holds something that is no record, before its last line; says where."""


def key_of(custom_id: str) -> int:
    """64 bits of a hash: what is remembered of each of millions of rows."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "big")


def success(
    record_id: str, custom_id: str, request_id: str, body: dict[str, Any]
) -> dict[str, Any]:
    """The record of a row that was answered."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": record_id, "custom_id": custom_id, "response": response, "error": None}


def failure(
    record_id: str, custom_id: str | None, line: int, code: str, message: str, param: str
) -> dict[str, Any]:
    """The record of a row that cannot be answered. A row without a usable custom_id (or with one
    that an earlier row has) is known by its line, counted from 1."""
    error = {"code": code, "message": message, "param": param or None, "line": line}
    return {"id": record_id, "custom_id": custom_id, "response": None, "error": error}


@dataclass
class Done:
    """What an output file already holds."""

    custom_ids: set[int] = field(default_factory=set)  # key_of each
    lines: set[int] = field(default_factory=set)  # rows known by line
    succeeded: int = 0
    failed: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Count one record. Raises KeyError, TypeError when it is none of ours."""
        if record["error"] is None:
            self.succeeded += 1
        else:
            self.failed += 1
        if record["custom_id"] is None:
            self.lines.add(int(record["error"]["line"]))
        else:
            self.custom_ids.add(key_of(record["custom_id"]))


class RecordFile:
    """An output file that this process alone appends to. Context manager.

    Raises OutputInUse, OutputCorrupt, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        try:
            self._lock(path)
            self.done = self._recover(path)
            _sync_directory(path.parent)
        except BaseException:
            self._file.close()
            raise

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write records and have them on the disk. OSError (for example a full disk) leaves the
        file as it was before."""
        data = b"".join(json.dumps(r).encode() + b"\n" for r in records)
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file.fileno(), data[written:])
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)
            raise
        for record in records:
            self.done.add(record)

    def close(self) -> None:
        """Give up the file."""
        self._file.close()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputInUse(f"{path} is being written by another process") from error

    def _recover(self, path: Path) -> Done:
        done, end = Done(), 0
        for number, (line, complete) in enumerate(_lines(self._file), 1):
            if not complete:
                break
            try:
                done.add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise OutputCorrupt(f"{path}, line {number}: not a record of a batch") from error
            end += len(line)
        if end != self._file.seek(0, os.SEEK_END):
            self._file.truncate(end)
            os.fsync(self._file.fileno())
        return done


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines with their newline, and whether they have one."""
    file.seek(0)
    for line in file:
        yield line, line.endswith(b"\n")


def _sync_directory(directory: Path) -> None:
    """A new file's name has to survive too."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
