"""Reading a Hugging Face checkpoint directory: where every tensor lies, checked before it is used.

Only safetensors. The files are read with `pread` at the tensors' own offsets, never mapped, so that
loading holds one copy of the weights and its resident size is what was asked for.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.errors import CheckpointError

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The format's own limit on the length of a file's header.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorLocation:
    """A tensor of the checkpoint: its bytes are `file[offset_bytes : offset_bytes + n_bytes]`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    n_bytes: int


class Checkpoint:
    """The directory's config and tensor locations. CheckpointError lists all that is wrong."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: dict[str, Any] = _read_config(directory)
        self.tensors = _locate(directory)

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that these tensors are there, each with this shape and a float type we read."""
        problems = []
        for name, shape in shapes.items():
            found = self.tensors.get(name)
            if found is None:
                problems.append(f"tensor {name} is missing")
            elif found.shape != shape:
                problems.append(f"tensor {name} has shape {list(found.shape)}, not {list(shape)}")
        if problems:
            raise CheckpointError(self.directory, _first(problems))

    def dtype(self) -> torch.dtype:
        """The type of most of the weights."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.n_bytes
        return max(sizes, key=lambda dtype: sizes[dtype])


@dataclass(frozen=True)
class StoredRows:
    """A tensor's rows (n_rows, columns) in an open file, one after the other; `scratch` (uint8) is
    memory of the calling thread that they may pass through."""

    tensor: TensorLocation
    descriptor: int
    scratch: torch.Tensor

    @property
    def n_rows(self) -> int:
        """Its first dimension."""
        return self.tensor.shape[0]

    @property
    def columns(self) -> int:
        """All other dimensions together."""
        return math.prod(self.tensor.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Of one row in the file."""
        return self.columns * self.tensor.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) after rows, as many at a time as the scratch memory holds; each is
        overwritten by the next. CheckpointError where the file ends too early."""
        rows_at_once = max(1, len(self.scratch) // self.row_bytes)
        for first in range(0, self.n_rows, rows_at_once):
            n_rows = min(rows_at_once, self.n_rows - first)
            piece = self.scratch[: n_rows * self.row_bytes]
            self.read_into(first * self.row_bytes, piece)
            yield first, piece.view(self.tensor.dtype).view(n_rows, self.columns)

    def copy_to(self, destination: torch.Tensor) -> None:
        """Fill `destination` (n_rows, columns) of any float type, converted where that differs."""
        for first, rows in self.pieces():
            destination[first : first + len(rows)].copy_(rows)

    def read_into(self, first_byte: int, destination: torch.Tensor) -> None:
        """Fill `destination` (uint8) with the tensor's bytes from `first_byte` on."""
        view = memoryview(destination.numpy().data)
        done_bytes = 0
        while done_bytes < len(view):
            offset_bytes = self.tensor.offset_bytes + first_byte + done_bytes
            n_bytes = os.preadv(self.descriptor, [view[done_bytes:]], offset_bytes)
            if not n_bytes:
                raise self.too_short()
            done_bytes += n_bytes

    def too_short(self) -> CheckpointError:
        """What to raise where the file ends within the tensor."""
        file = self.tensor.file
        problem = f"{file.name} ends inside tensor {self.tensor.name}"
        return CheckpointError(file.parent, [problem])


class TensorReader:
    """Open shards, read from by several threads at once. Use as a context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def open(self, file: Path) -> None:
        """Open a shard; done for all of them before threads read."""
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def rows(self, tensor: TensorLocation, scratch: torch.Tensor) -> StoredRows:
        """The tensor's rows, to be read by the calling thread."""
        return StoredRows(tensor, self._descriptors[tensor.file], scratch)


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise CheckpointError(directory, ["no such directory"])
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        raise CheckpointError(directory, ["config.json is missing"]) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(directory, [f"config.json cannot be read: {error}"]) from error
    if not isinstance(config, dict):
        raise CheckpointError(directory, ["config.json is not a JSON object"])
    return config


def _locate(directory: Path) -> dict[str, TensorLocation]:
    index = directory / INDEX_NAME
    weight_map = _read_index(index) if index.exists() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    problems: list[str] = []
    tensors: dict[str, TensorLocation] = {}
    for name in files:
        tensors.update(_read_header(directory / name, problems))
    if weight_map is not None and not problems:
        problems += _index_problems(weight_map, tensors)
    if problems:
        raise CheckpointError(directory, _first(problems))
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name → shard name, as the index says."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            index.parent, [f"{index.name} has no readable weight_map: {error!r}"]
        ) from error
    bad = [shard for shard in set(weight_map.values()) if Path(shard).name != shard]
    if bad:
        raise CheckpointError(index.parent, [f"{index.name} names a file outside: {bad[0]!r}"])
    return dict(weight_map)


def _index_problems(
    weight_map: Mapping[str, str], tensors: Mapping[str, TensorLocation]
) -> list[str]:
    """Tensors that are not in the shard that the index names."""
    problems = []
    for name, shard in weight_map.items():
        found = tensors.get(name)
        if found is None:
            problems.append(f"the index puts tensor {name} in {shard}, which does not hold it")
        elif found.file.name != shard:
            problems.append(f"the index puts tensor {name} in {shard}; it is in {found.file.name}")
    return problems


def _read_header(file: Path, problems: list[str]) -> dict[str, TensorLocation]:
    """Tensors of one shard; what is wrong with the file is appended to `problems`."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes < 8 or header_bytes > min(size_bytes - 8, MAX_HEADER_BYTES):
                problems.append(f"{file.name} is truncated or no safetensors file")
                return {}
            header = json.loads(stream.read(header_bytes))
    except FileNotFoundError:
        problems.append(f"{file.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{file.name} has no readable header: {error}")
        return {}
    base_bytes = 8 + header_bytes
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    found = (_tensor(file, name, entry, base_bytes, problems) for name, entry in entries.items())
    tensors = {tensor.name: tensor for tensor in found if tensor is not None}
    _check_extent(file, tensors, base_bytes, size_bytes, problems)
    return tensors


def _tensor(
    file: Path, name: str, entry: Any, base_bytes: int, problems: list[str]
) -> TensorLocation | None:
    try:
        shape = tuple(int(n) for n in entry["shape"])
        begin_bytes, end_bytes = (int(n) for n in entry["data_offsets"])
        dtype = DTYPES.get(entry["dtype"])
    except (KeyError, TypeError, ValueError):
        problems.append(f"{file.name}: the header entry of {name} is malformed")
        return None
    if dtype is None:
        supported = ", ".join(DTYPES)
        problems.append(
            f"{file.name}: tensor {name} is {entry['dtype']}; supported are {supported}"
        )
        return None
    n_bytes = math.prod(shape) * dtype.itemsize
    if end_bytes - begin_bytes != n_bytes or begin_bytes < 0:
        problems.append(
            f"{file.name}: tensor {name} spans {end_bytes - begin_bytes} bytes, "
            f"its shape {list(shape)} needs {n_bytes}"
        )
        return None
    return TensorLocation(name, file, dtype, shape, base_bytes + begin_bytes, n_bytes)


def _check_extent(
    file: Path,
    tensors: Mapping[str, TensorLocation],
    base_bytes: int,
    size_bytes: int,
    problems: list[str],
) -> None:
    """The tensors end where the file ends; a file cut short says by how much."""
    end_bytes = max((t.offset_bytes + t.n_bytes for t in tensors.values()), default=base_bytes)
    if end_bytes > size_bytes:
        problems.append(
            f"{file.name} is truncated: {size_bytes} bytes, its header describes {end_bytes}"
        )


def _first(problems: list[str], limit: int = 20) -> list[str]:
    """The first problems; a count stands for the rest."""
    rest = len(problems) - limit
    return problems if rest <= 0 else [*problems[:limit], f"and {rest} more"]
