"""Executes batches over the layers: groups of tokens, each layer cut into GA, attention and GB.

A stage is GB of layer l and GA of layer l + 1, for one group after the other. While the CPU worker
computes attention of one group the device works on the other. One group is the sequential engine:
the same loop, nothing to overlap with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker import own_attention
from gpu_worker.activations import Activations
from gpu_worker.groups import ChunkCosts, split
from gpu_worker.head import Head, StepOutput
from gpu_worker.model import Decoder
from gpu_worker.port import ATTEND_EARLIER_ONLY, ITEM, AttentionPort
from gpu_worker.session import Batch, Chunk
from gpu_worker.streaming import StageWeights
from gpu_worker.timing import StepClock, Timeline
from gpu_worker.weights import BlockWeights

Tensor = torch.Tensor
GROUP_NAMES = "αβ"


@dataclass(frozen=True)
class Schedule:
    """How a batch goes through the layers."""

    # Two groups, so that CPU and device work at the same time; else one.
    pipelined: bool = False
    # Attention inside prefill chunks is the device's; else the CPU's like all other.
    chunks_on_device: bool = False
    costs: ChunkCosts = field(default_factory=ChunkCosts)
    attention_timeout_s: float = 60.0


@dataclass
class Group:
    """Chunks that go through a layer together, in one slot of the channel."""

    slot: int
    chunks: list[Chunk]
    positions: Tensor  # (tokens,)
    x: Tensor  # (tokens, hidden)
    # Rows whose attention the device computes in part, and the lengths of their chunks.
    own_rows: Tensor | None
    own_counts: list[int]
    own: tuple[Tensor, Tensor] | None = None  # this layer's part: out and lse of own_rows

    @property
    def n_tokens(self) -> int:
        """Tokens of all its chunks."""
        return len(self.positions)

    @property
    def name(self) -> str:
        """α or β."""
        return GROUP_NAMES[self.slot]


class Engine:
    """One model on one device, one channel to a CPU worker."""

    def __init__(
        self,
        decoder: Decoder,
        weights: StageWeights,
        port: AttentionPort,
        activations: Sequence[Activations],
        device: torch.device,
        schedule: Schedule = Schedule(),
        timeline: Timeline | None = None,
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._port = port
        self._activations = list(activations)
        self._device = device
        self._schedule = schedule
        self._timeline = timeline
        self._n_layers = decoder.config.n_layers
        self._scale = decoder.config.head_dim**-0.5
        self._head = Head(decoder, weights.base)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Execute a batch; sampled tokens are appended to their sequences.

        What the port raises (a peer that died or hangs) passes through; the session is then lost.
        """
        clock = StepClock(self._timeline)
        output = StepOutput(batch.step_id)
        output.errors += [(s.sequence_id, s.failure or "") for s in batch.failed]
        moved = self._weights.stats()
        worked = replace(self._decoder.op_times)
        if batch.chunks:
            self._weights.begin_pass()
            groups = self._groups(batch, clock)
            self._layers(groups, clock)
            self._sample(batch, groups, output, clock)
        output.times = clock.stop()
        now = self._weights.stats()
        output.times.link_s = now.busy_s - moved.busy_s
        output.times.weights_streamed_bytes = now.moved_bytes - moved.moved_bytes
        output.times.gemm_s = self._decoder.op_times.gemm_s - worked.gemm_s
        output.times.routing_s = self._decoder.op_times.routing_s - worked.routing_s
        return output

    # -- groups ---------------------------------------------------------------------------------

    def _groups(self, batch: Batch, clock: StepClock) -> list[Group]:
        with clock.measure("device_s", "embedding"):
            if not self._schedule.pipelined:
                return [self._group(0, batch.chunks)]
            parts = split(batch.chunks, self._schedule.costs)
            return [self._group(slot, chunks) for slot, chunks in enumerate(parts)]

    def _group(self, slot: int, chunks: list[Chunk]) -> Group:
        """Tell the CPU worker which tokens the slot will hold, and embed them."""
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        offsets = np.cumsum(counts) - counts
        items = np.zeros(len(chunks), dtype=ITEM)
        items["row"] = [chunk.sequence.row for chunk in chunks]
        items["start_position"], items["n_tokens"] = starts, counts
        items["slot_offset"] = offsets
        own_rows, own_counts = None, list[int]()
        if self._schedule.chunks_on_device:
            items["flags"] = np.where(counts > 1, ATTEND_EARLIER_ONLY, 0)
            rows, own_counts = own_attention.prefill_rows(chunks)
            own_rows = torch.tensor(rows, device=self._device) if rows else None
        self._port.prepare(slot, items)
        positions = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
        tokens = np.concatenate([c.sequence.tokens[c.start : c.start + c.count] for c in chunks])
        x = self._decoder.embed(self._weights.base, self._on_device(tokens))
        return Group(slot, chunks, self._on_device(positions), x, own_rows, own_counts)

    def _on_device(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device)

    # -- layers ---------------------------------------------------------------------------------

    def _layers(self, groups: list[Group], clock: StepClock) -> None:
        """Prologue: GA of layer 0. Then a stage for each layer; the last one has no GA."""
        for group in groups:
            self._attention_in(group, self._weights.base, 0, clock)
        for layer in range(self._n_layers):
            with clock.measure("idle_link_s", f"wait for weights {layer}"):
                weights = self._weights.acquire(layer)
            for group in groups:
                attention = self._attention(group, layer, clock)
                with clock.measure("device_s", f"GB {layer} {group.name}"):
                    group.x = self._decoder.attention_out(group.x, attention, weights)
                if layer + 1 < self._n_layers:
                    self._attention_in(group, weights, layer + 1, clock)
            self._weights.release(layer)

    def _attention_in(
        self, group: Group, weights: BlockWeights, layer: int, clock: StepClock
    ) -> None:
        """GA of a group, whose attention then starts on the CPU."""
        activations = self._activations[group.slot]
        with clock.measure("device_s", f"GA {layer} {group.name}"):
            q, k, v = activations.inputs(group.n_tokens)
            self._decoder.attention_in(group.x, weights, group.positions, q, k, v)
        with clock.measure(activations.send_counts_as, f"q, k, v {layer} {group.name}"):
            activations.send(group.n_tokens)
        self._port.post(group.slot, layer)
        if group.own_rows is not None:
            with clock.measure("device_s", f"attention in chunks {layer} {group.name}"):
                rows = group.own_rows
                group.own = own_attention.causal_by_chunk(
                    q[rows], k[rows], v[rows], group.own_counts, self._scale
                )

    def _attention(self, group: Group, layer: int, clock: StepClock) -> Tensor:
        """The attention of a group's current layer, once the CPU has its part."""
        with clock.measure("idle_attention_s", f"wait for attention {layer} {group.name}"):
            job = self._port.wait(group.slot, self._schedule.attention_timeout_s)
        spans = self._port.process_spans(group.slot) if self._timeline is not None else []
        clock.count_attention(f"{layer} {group.name}", job, spans)
        with clock.measure("idle_link_s", f"attention out {layer} {group.name}"):
            out, lse = self._activations[group.slot].receive(group.n_tokens)
        if group.own_rows is not None and group.own is not None:
            with clock.measure("device_s", f"merge {layer} {group.name}"):
                rows = group.own_rows
                out[rows] = own_attention.merge((out[rows], lse[rows]), group.own)
        return out

    # -- tokens ---------------------------------------------------------------------------------

    def _sample(
        self, batch: Batch, groups: list[Group], output: StepOutput, clock: StepClock
    ) -> None:
        """Head and sampler over all groups at once, in the plan's order."""
        rows = {id(chunk): part for group in groups for chunk, part in _rows_by_chunk(group)}
        ordered = [(chunk, rows[id(chunk)]) for chunk in batch.chunks]
        self._head.sample(ordered, output, clock)


def _rows_by_chunk(group: Group) -> Iterator[tuple[Chunk, Tensor]]:
    counts = [chunk.count for chunk in group.chunks]
    return zip(group.chunks, torch.split(group.x, counts), strict=True)
