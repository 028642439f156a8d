"""Lines of a batch's input, read one by one: the input may be larger than memory."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Line:
    """Line `number` (from 1). `fault` says why `data` was not kept."""

    number: int
    data: bytes
    fault: str = ""


async def read_lines(file: IO[bytes]) -> AsyncIterator[Line]:
    """Every line that is not blank. Reading happens in a thread, some lines ahead."""
    number = 0
    while True:
        lines = await asyncio.to_thread(_read_some, file)
        if not lines:
            return
        for data, fault in lines:
            number += 1
            if fault or data.strip():
                yield Line(number, data, fault)


def count_rows(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if not line.isspace())


def _read_some(file: IO[bytes], most: int = 64) -> list[tuple[bytes, str]]:
    """Up to `most` lines; an interactive input gives one at a time."""
    lines = []
    for _ in range(1 if file.isatty() else most):
        data = file.readline(MAX_LINE_BYTES + 1)
        if not data:
            break
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            _skip_line(file)
            lines.append((b"", f"the line is longer than {MAX_LINE_BYTES} bytes"))
        else:
            lines.append((data, ""))
    return lines


def _skip_line(file: IO[bytes]) -> None:
    while (data := file.readline(1 << 20)) and not data.endswith(b"\n"):
        pass
