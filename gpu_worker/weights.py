"""The weights in host memory: one mapping, one block after the other, filled from the shards.

    | base                                | stage 0      | stage 1      | … | stage L-1 |
    | embedding, norm, head, GA of layer 0 | GB 0, GA 1   | GB 1, GA 2   | … | GB L-1    |

A block is contiguous and page aligned and is what the data mover moves. Block `l` holds what the
device needs while it finishes layer l and begins layer l + 1 (the pipeline's stage), so that two
blocks in device memory are enough: one in use, one on its way. The base is always on the device.
"""

import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType

import torch

from gpu_worker import memory
from gpu_worker.checkpoint import Checkpoint, TensorLocation, TensorReader
from gpu_worker.errors import LoadingStopped
from gpu_worker.families import DecoderConfig, Slot
from gpu_worker.memory import PAGE_BYTES, round_up
from gpu_worker.ops import Linear, Ops

# A cache line, which is also what packed matrices ask for.
SLOT_ALIGNMENT_BYTES = 64
# A tensor that has to be packed or converted passes through a buffer of this size, which a core's
# second-level cache holds, but at least so many of its rows: packed matrices are written in panels.
SCRATCH_BYTES = 512 << 10
PANEL_ROWS = 64


@dataclass(frozen=True)
class PlacedSlot:
    """A slot and where it lies in its block."""

    slot: Slot
    offset_bytes: int
    n_bytes: int


@dataclass(frozen=True)
class Block:
    """A run of slots that moves as a whole."""

    slots: dict[str, PlacedSlot]
    n_bytes: int


@dataclass
class LoadProgress:
    """How far loading is; written by the loading threads, read by anyone."""

    total_bytes: int = 0
    loaded_bytes: int = 0
    started_s: float = field(default_factory=time.monotonic)
    stop: bool = False  # set by whoever wants loading to end with LoadingStopped
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, n_bytes: int) -> None:
        """Count bytes as loaded."""
        with self._lock:
            self.loaded_bytes += n_bytes

    @property
    def bytes_per_s(self) -> float:
        """Mean rate since the start."""
        return self.loaded_bytes / max(time.monotonic() - self.started_s, 1e-9)

    @property
    def seconds_left(self) -> float:
        """At the mean rate so far; infinite before the first byte."""
        rate = self.bytes_per_s
        return (self.total_bytes - self.loaded_bytes) / rate if rate else math.inf


class BlockWeights:
    """A block's weights as the device's ops take them, wherever the block lies in device memory."""

    def __init__(self, block: Block, where: torch.Tensor, ops: Ops) -> None:
        self._vectors: dict[str, torch.Tensor] = {}
        self._linears: dict[str, Linear] = {}
        for name, placed in block.slots.items():
            part = where[placed.offset_bytes : placed.offset_bytes + placed.n_bytes]
            slot = placed.slot
            if slot.is_linear:
                count, rows, columns = slot.shape
                self._linears[name] = ops.linear(part, count, rows, columns, slot.swiglu)
            else:
                self._vectors[name] = part.view(ops.dtype).view(slot.shape)

    def __contains__(self, name: str) -> bool:
        return name in self._vectors or name in self._linears

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight or the embedding table."""
        return self._vectors[name]

    def linear(self, name: str) -> Linear:
        """Matrices to apply with the ops that this was made with."""
        return self._linears[name]


class HostStore:
    """All weights in host memory, exactly as large as they are."""

    def __init__(self, base: Block, stages: Sequence[Block]) -> None:
        self.base = base
        self.stages = list(stages)
        sizes = [round_up(block.n_bytes, PAGE_BYTES) for block in (base, *stages)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.n_bytes = sum(sizes)
        self.memory = memory.allocate(self.n_bytes)

    def base_bytes(self) -> torch.Tensor:
        """The base block (uint8)."""
        return self.memory[: self.base.n_bytes]

    def stage_bytes(self, stage: int) -> torch.Tensor:
        """The block of one stage (uint8)."""
        start = self._starts[1 + stage]
        return self.memory[start : start + self.stages[stage].n_bytes]


def place(slots: Iterable[Slot], ops: Ops) -> Block:
    """Lay slots out one after the other, each on a cache line."""
    placed: dict[str, PlacedSlot] = {}
    offset_bytes = 0
    for slot in slots:
        n_bytes = slot_bytes(slot, ops)
        placed[slot.name] = PlacedSlot(slot, offset_bytes, n_bytes)
        offset_bytes = round_up(offset_bytes + n_bytes, SLOT_ALIGNMENT_BYTES)
    return Block(placed, offset_bytes)


def slot_bytes(slot: Slot, ops: Ops) -> int:
    """Size of a slot as the device stores it."""
    if not slot.is_linear:
        return math.prod(slot.shape) * ops.dtype.itemsize
    count, rows, columns = slot.shape
    return count * ops.matrix_bytes(rows, columns, slot.swiglu)


def plan_blocks(family: ModuleType, config: DecoderConfig, ops: Ops) -> tuple[Block, list[Block]]:
    """The base block and the block of every stage."""
    base = [*family.global_slots(config), *family.attention_in_slots(config, 0)]
    stages = []
    for layer in range(config.n_layers):
        slots = family.attention_out_slots(config, layer)
        if layer + 1 < config.n_layers:
            slots += family.attention_in_slots(config, layer + 1)
        stages.append(place(slots, ops))
    return place(base, ops), stages


def block_sizes(family: ModuleType, config: DecoderConfig, ops: Ops) -> list[int]:
    """Bytes of host memory that each block will take, the base first."""
    base, stages = plan_blocks(family, config, ops)
    return [round_up(block.n_bytes, PAGE_BYTES) for block in (base, *stages)]


def check_tensors(checkpoint: Checkpoint, blocks: Iterable[Block]) -> None:
    """CheckpointError where a slot's tensors are missing or have another shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        for placed in block.slots.values():
            for names in placed.slot.sources:
                shapes.update(zip(names, placed.slot.source_shapes, strict=True))
    checkpoint.require(shapes)


def load(
    checkpoint: Checkpoint,
    family: ModuleType,
    config: DecoderConfig,
    ops: Ops,
    progress: LoadProgress,
    n_threads: int | None = None,
) -> HostStore:
    """Read the checkpoint into a new store. CheckpointError; MemoryShortage before allocating."""
    base, stages = plan_blocks(family, config, ops)
    check_tensors(checkpoint, (base, *stages))
    total_bytes = sum(block.n_bytes for block in (base, *stages))
    memory.require("loading the weights", [("weights", total_bytes)])
    store = HostStore(base, stages)
    regions = [(base, store.base_bytes())]
    regions += [(block, store.stage_bytes(i)) for i, block in enumerate(stages)]
    tasks = [task for block, where in regions for task in _fill_tasks(block, where, checkpoint)]
    progress.total_bytes = sum(task.tensor.n_bytes for task in tasks)
    progress.started_s = time.monotonic()
    with TensorReader() as reader, ThreadPoolExecutor(n_threads or os.cpu_count()) as pool:
        for file in {task.tensor.file for task in tasks}:
            reader.open(file)
        filler = _Filler(reader, ops, progress)
        # list() raises the first failure.
        list(pool.map(filler.fill, tasks))
    return store


@dataclass(frozen=True)
class _FillTask:
    """One checkpoint tensor and the rows of the matrix (or vector) that it fills."""

    tensor: TensorLocation
    slot: Slot
    first_row: int
    where: torch.Tensor  # the whole matrix (or vector), uint8


def _fill_tasks(block: Block, where: torch.Tensor, checkpoint: Checkpoint) -> Iterable[_FillTask]:
    for placed in block.slots.values():
        matrix_bytes = placed.n_bytes // len(placed.slot.sources)
        for i, names in enumerate(placed.slot.sources):
            start = placed.offset_bytes + i * matrix_bytes
            matrix = where[start : start + matrix_bytes]
            first_row = 0
            for name, shape in zip(names, placed.slot.source_shapes, strict=True):
                tensor = checkpoint.tensors[name]
                yield _FillTask(tensor, placed.slot, first_row, matrix)
                first_row += shape[0]


class _Filler:
    """Fills slots; every thread has a scratch buffer of its own."""

    def __init__(self, reader: TensorReader, ops: Ops, progress: LoadProgress) -> None:
        self._reader = reader
        self._ops = ops
        self._progress = progress
        self._local = threading.local()

    def fill(self, task: _FillTask) -> None:
        """Read a tensor to where it belongs: directly where it is stored as it comes."""
        if self._progress.stop:
            raise LoadingStopped
        tensor, slot = task.tensor, task.slot
        source = self._reader.rows(tensor, self._scratch(tensor))
        rows = self._plain_rows(task)
        if rows is None:
            _, n_rows, columns = slot.shape
            self._ops.pack(task.where, n_rows, columns, task.first_row, slot.swiglu, source)
        else:
            part = rows[task.first_row : task.first_row + source.n_rows]
            if tensor.dtype == self._ops.dtype:
                source.read_into(0, part.view(-1).view(torch.uint8))
            else:
                source.copy_to(part)
        self._progress.add(tensor.n_bytes)

    def _plain_rows(self, task: _FillTask) -> torch.Tensor | None:
        slot = task.slot
        if not slot.is_linear:
            return task.where.view(self._ops.dtype).view(slot.shape[0], -1)
        return self._ops.plain_matrix(task.where, slot.shape[1], slot.shape[2])

    def _scratch(self, tensor: TensorLocation) -> torch.Tensor:
        """The thread's own, for at least a panel of the tensor's rows."""
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        n_bytes = max(SCRATCH_BYTES, PANEL_ROWS * row_bytes)
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < n_bytes:
            buffer = self._local.buffer = torch.empty(n_bytes, dtype=torch.uint8)
        return buffer
