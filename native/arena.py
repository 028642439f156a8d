"""The KV arena: the memory that holds all keys and values, mapped by attention processes alone.

A file beside its segment, [layer][block] (native/abi.h). It loses its name as soon as all attention
processes have mapped it, so that the memory goes when the last of them does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from native._channel import ffi, lib
from native.errors import InvalidArgumentError
from native.segment import MAX_NODES, ChannelGeometry, check_status


class Arena:
    """A mapped arena. A context manager; leaving it unmaps."""

    def __init__(self, address: Any, size_bytes: int, path: Path) -> None:
        self._address = address
        self.size_bytes = size_bytes
        self.path = path

    @classmethod
    def reserve(
        cls, path: Path, geometry: ChannelGeometry, nodes: Sequence[int], huge_pages: bool
    ) -> Self:
        """Make the file at `path` (mode 0600) with all its memory, zeroed.

        `nodes` are the kernel's numbers of the geometry's n_nodes NUMA nodes: each gets an equal
        range of block ids. Every page is touched here, so that lack of memory shows now as OSError
        (nothing is left behind) and never later as a signal. Takes about 1 s for 3 GB; releases
        the GIL.
        """
        if len(nodes) != geometry.n_nodes or len(nodes) > MAX_NODES:
            raise InvalidArgumentError(f"nodes: {len(nodes)} given, {geometry.n_nodes} expected")
        layout = geometry.layout()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            address = ffi.new("void **")
            check_status(
                lib.ml_arena_reserve(
                    fd, layout, geometry.to_c(), list(nodes), int(huge_pages), address
                ),
                path,
            )
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(address[0], layout.kv_arena_bytes, path)

    @classmethod
    def open(cls, path: Path, geometry: ChannelGeometry) -> Self:
        """Map an arena that `reserve` made. Raises OSError; ChannelError on a wrong size."""
        size_bytes = geometry.layout().kv_arena_bytes
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            address = ffi.new("void **")
            check_status(lib.ml_arena_map(fd, size_bytes, address), path)
        finally:
            os.close(fd)
        return cls(address[0], size_bytes, path)

    @property
    def address(self) -> Any:
        """Where it is mapped, as a `void *`."""
        return self._address

    @property
    def buffer(self) -> Any:
        """All of it as a writable buffer."""
        return ffi.buffer(self._address, self.size_bytes)

    def huge_page_bytes(self) -> int:
        """How much of this mapping is in huge pages, as the kernel says."""
        start = int(ffi.cast("uintptr_t", self._address))
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
                inside = int(line.split("-", 1)[0], 16) == start
            elif inside and line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) * 1024
        return 0

    def unlink(self) -> None:
        """Remove the file's name; who has it mapped keeps it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap."""
        address, self._address = self._address, None
        if address is not None:
            check_status(lib.ml_arena_unmap(address, self.size_bytes), self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
