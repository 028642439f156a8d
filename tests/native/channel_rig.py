"""A segment with attention loops on it, and sequences whose attention is known in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native import attention
from native.arena import Arena
from native.attention_loop import run_attention_loop
from native.channel import ATTEND_EARLIER_ONLY, BLOCK_TOKENS, ITEM_DTYPE, STORE_ONLY, DevicePort
from native.segment import CONTROL, ChannelGeometry, Segment, arena_path
from tests.native.reference import reference_attention

GEOMETRY = ChannelGeometry(
    n_layers=2,
    n_q_heads=4,
    n_kv_heads=2,
    head_dim=32,
    kv_dtype="fp32",
    kv_blocks=256,
    max_sequences=16,
    max_context_tokens=2048,
    max_slot_tokens=1024,
    n_processes=2,
    scale=32**-0.5,
)


class Control:
    """Makes a segment and its arena, and beats for the control process as the CPU worker does."""

    def __init__(self, directory: Path, geometry: ChannelGeometry, epoch: int = 1) -> None:
        self.segment = Segment.create(directory, geometry, epoch)
        nodes = [0] * geometry.n_nodes
        self.arena = Arena.reserve(arena_path(self.segment.path), geometry, nodes, False)
        # What a former owner left: NaN everywhere, in either dtype.
        self.arena.buffer[:] = b"\xff" * self.arena.size_bytes
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._beat)
        self._beating.start()

    def _beat(self) -> None:
        while not self._stop.wait(0.05):
            self.segment.beat(CONTROL)

    def publish(self) -> None:
        self.segment.publish()

    def close(self) -> None:
        self._stop.set()
        self._beating.join()
        self.segment.retire()
        self.arena.unlink()
        self.segment.unlink()
        self.arena.close()
        self.segment.close()


class LoopThread:
    """An attention loop in a thread of this process, with a handle of its own."""

    def __init__(self, path: Path, index: int, node: int = 0) -> None:
        self._arguments = (path, index, node)
        self.reason: str | None = None
        self._segment = Segment.open(path)
        self._arena = Arena.open(arena_path(path), self._segment.geometry)
        self._thread = threading.Thread(target=self._run, args=(index, node))
        self._thread.start()

    def _run(self, index: int, node: int) -> None:
        self.reason = run_attention_loop(self._segment, self._arena, index, node=node, spin_s=0)
        self._arena.close()
        self._segment.close()

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


@contextmanager
def running(directory: Path, geometry: ChannelGeometry, **port: Any) -> Iterator[DevicePort]:
    """A port on a new segment with attention loops in threads; everything is gone afterwards."""
    control = Control(directory, geometry)
    loops: list[LoopThread] = []
    try:
        loops = [
            LoopThread(control.segment.path, index, index % geometry.n_nodes)
            for index in range(geometry.n_processes)
        ]
        control.publish()
        with DevicePort(control.segment.path, spin_s=0, **port) as opened:
            yield opened
    finally:
        control.close()
        for loop in loops:
            loop.join()


@dataclass
class SequenceKv:
    """All K and V of one sequence so far: per layer, (tokens, n_kv_heads, head_dim) float32."""

    k: list[NDArray[np.float32]]
    v: list[NDArray[np.float32]]
    blocks: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.k[0])


@dataclass(frozen=True)
class Chunk:
    """New tokens of the sequence in a row."""

    row: int
    n_tokens: int
    flags: int = 0


class Cache:
    """The device's view of sequences: their blocks, and the K and V that were sent for them."""

    def __init__(self, port: DevicePort, seed: int) -> None:
        self.port = port
        self.geometry = port.geometry
        self.rng = np.random.default_rng(seed)
        self.free = [int(i) for i in self.rng.permutation(self.geometry.kv_blocks)]
        self.sequences: dict[int, SequenceKv] = {}

    def normal(self, rows: int, heads: int) -> NDArray[np.float32]:
        """Standard normal rows, exactly representable in the activations' dtype."""
        values = self.rng.standard_normal((rows, heads, self.geometry.head_dim), dtype=np.float32)
        if self.geometry.kv_dtype == "fp32":
            return values
        return attention.from_bf16(attention.to_bf16(values))

    def encode(self, values: NDArray[np.float32]) -> NDArray[Any]:
        return values if self.geometry.kv_dtype == "fp32" else attention.to_bf16(values)

    def decode(self, values: NDArray[Any]) -> NDArray[np.float32]:
        return values.copy() if values.dtype == np.float32 else attention.from_bf16(values)

    def release(self, row: int) -> None:
        self.free += self.sequences.pop(row).blocks
        self.port.clear_row(row)

    def grow(self, row: int, n_tokens: int) -> None:
        """Give the sequence in `row` the blocks for n_tokens more."""
        empty = np.empty((0, self.geometry.n_kv_heads, self.geometry.head_dim), np.float32)
        layers = range(self.geometry.n_layers)
        new = SequenceKv([empty for _ in layers], [empty for _ in layers])
        sequence = self.sequences.setdefault(row, new)
        needed = -(-(sequence.n_tokens + n_tokens) // BLOCK_TOKENS) - len(sequence.blocks)
        blocks = [self.free.pop() for _ in range(needed)]
        self.port.set_blocks(row, len(sequence.blocks), blocks)
        sequence.blocks += blocks

    def step(self, slot: int, chunks: Sequence[Chunk]) -> list[tuple[Any, Any]]:
        """Run one step over all layers; returns (out, lse) of each layer as the port gave it,
        chunks one after the other. `last_expected` holds the same in float64."""
        items = np.zeros(len(chunks), ITEM_DTYPE)
        offset = 0
        for i, chunk in enumerate(chunks):
            self.grow(chunk.row, chunk.n_tokens)
            start = self.sequences[chunk.row].n_tokens
            items[i] = (chunk.row, start, chunk.n_tokens, offset, chunk.flags)
            offset += chunk.n_tokens
        self.port.prepare(slot, items)
        self.last_expected: list[tuple[Any, Any]] = []
        return [self._layer(slot, layer, items, offset) for layer in range(self.geometry.n_layers)]

    def _layer(self, slot: int, layer: int, items: Any, n_rows: int) -> tuple[Any, Any]:
        g, port = self.geometry, self.port
        q, k, v = (self.normal(n_rows, n) for n in (g.n_q_heads, g.n_kv_heads, g.n_kv_heads))
        port.q(slot)[:n_rows] = self.encode(q)
        port.k(slot)[:n_rows] = self.encode(k)
        port.v(slot)[:n_rows] = self.encode(v)
        port.out(slot)[:n_rows].view(np.uint8)[:] = 0xFF
        port.lse(slot)[:n_rows] = np.nan
        port.post(slot, layer)
        port.wait(slot, timeout_s=30)
        self.last_expected.append(self._expect(layer, items, q, k, v))
        return self.decode(port.out(slot)[:n_rows]), port.lse(slot)[:n_rows].copy()

    def _expect(self, layer: int, items: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        g = self.geometry
        out = np.full(q.shape, np.nan)
        lse = np.full(q.shape[:2], np.nan)
        for item in items:
            sequence = self.sequences[int(item["row"])]
            rows = slice(item["slot_offset"], item["slot_offset"] + item["n_tokens"])
            earlier_k, earlier_v = sequence.k[layer], sequence.v[layer]
            sequence.k[layer] = np.concatenate([earlier_k, k[rows]])
            sequence.v[layer] = np.concatenate([earlier_v, v[rows]])
            if item["flags"] & STORE_ONLY:
                continue
            if item["flags"] & ATTEND_EARLIER_ONLY:
                context = earlier_k, earlier_v
            else:
                context = sequence.k[layer], sequence.v[layer]
            if len(context[0]) == 0:
                out[rows], lse[rows] = 0, -np.inf
                continue
            start = int(item["start_position"])
            out[rows], lse[rows] = reference_attention(q[rows], *context, start, g.scale)
        return out, lse


def with_processes(geometry: ChannelGeometry, n_processes: int) -> ChannelGeometry:
    return replace(geometry, n_processes=n_processes)
