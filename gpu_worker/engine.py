"""Executes batches over the layers: groups of tokens, each layer cut into GA, attention and GB.

A stage is GB of layer l and GA of layer l + 1, for one group after the other. While the CPU worker
computes attention of one group the device works on the other. One group is the sequential engine:
the same loop, nothing to overlap with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.activations import Activations
from gpu_worker.head import Head, StepOutput
from gpu_worker.model import Decoder
from gpu_worker.port import ITEM, AttentionPort
from gpu_worker.session import Batch, Chunk
from gpu_worker.streaming import StageWeights
from gpu_worker.timing import StepClock, Timeline
from gpu_worker.weights import BlockWeights


@dataclass
class Group:
    """Chunks that go through a layer together, in one slot of the channel."""

    slot: int
    chunks: list[Chunk]
    positions: torch.Tensor  # (tokens,)
    x: torch.Tensor  # (tokens, hidden)

    @property
    def n_tokens(self) -> int:
        """Tokens of all its chunks."""
        return len(self.positions)


class Engine:
    """One model on one device, one channel to a CPU worker."""

    def __init__(
        self,
        decoder: Decoder,
        weights: StageWeights,
        port: AttentionPort,
        activations: Sequence[Activations],
        device: torch.device,
        attention_timeout_s: float = 60.0,
        timeline: Timeline | None = None,
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._port = port
        self._activations = list(activations)
        self._device = device
        self._attention_timeout_s = attention_timeout_s
        self._timeline = timeline
        self._n_layers = decoder.config.n_layers
        self._head = Head(decoder, weights.base)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Execute a batch; sampled tokens are appended to their sequences.

        What the port raises (a peer that died or hangs) passes through; the session is then lost.
        """
        clock = StepClock(self._timeline)
        output = StepOutput(batch.step_id)
        output.errors += [(s.sequence_id, s.failure or "") for s in batch.failed]
        if batch.chunks:
            groups = self._groups(batch, clock)
            self._layers(groups, clock)
            for group in groups:
                self._head.sample(group.chunks, group.x, output, clock)
        output.times = clock.stop()
        return output

    # -- layers ---------------------------------------------------------------------------------

    def _groups(self, batch: Batch, clock: StepClock) -> list[Group]:
        with clock.measure("device_s", "embedding"):
            return [self._group(0, batch.chunks)]

    def _group(self, slot: int, chunks: list[Chunk]) -> Group:
        """Tell the CPU worker which tokens the slot will hold, and embed them."""
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        offsets = np.cumsum(counts) - counts
        items = np.zeros(len(chunks), dtype=ITEM)
        items["row"] = [chunk.sequence.row for chunk in chunks]
        items["start_position"], items["n_tokens"] = starts, counts
        items["slot_offset"] = offsets
        self._port.prepare(slot, items)
        positions = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
        tokens = np.concatenate([c.sequence.tokens[c.start : c.start + c.count] for c in chunks])
        x = self._decoder.embed(self._weights.base, self._on_device(tokens))
        return Group(slot, chunks, self._on_device(positions), x)

    def _on_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device)

    def _layers(self, groups: list[Group], clock: StepClock) -> None:
        for group in groups:
            self._attention_in(group, self._weights.base, 0, clock)
        for layer in range(self._n_layers):
            with clock.measure("idle_link_s", f"weights {layer}"):
                weights = self._weights.acquire(layer)
            for group in groups:
                attention = self._attention(group, layer, clock)
                with clock.measure("device_s", f"GB {layer} {'αβ'[group.slot]}"):
                    group.x = self._decoder.attention_out(group.x, attention, weights)
                if layer + 1 < self._n_layers:
                    self._attention_in(group, weights, layer + 1, clock)
            self._weights.release(layer)

    def _attention_in(
        self, group: Group, weights: BlockWeights, layer: int, clock: StepClock
    ) -> None:
        """GA of a group, whose attention then starts on the CPU."""
        activations = self._activations[group.slot]
        with clock.measure("device_s", f"GA {layer} {'αβ'[group.slot]}"):
            q, k, v = activations.inputs(group.n_tokens)
            self._decoder.attention_in(group.x, weights, group.positions, q, k, v)
            activations.send(group.n_tokens)
        self._port.post(group.slot, layer)

    def _attention(self, group: Group, layer: int, clock: StepClock) -> torch.Tensor:
        """The attention of a group's current layer, once the CPU has it."""
        with clock.measure("idle_attention_s", f"attention {layer} {'αβ'[group.slot]}"):
            job = self._port.wait(group.slot, self._attention_timeout_s)
            out, _ = self._activations[group.slot].receive(group.n_tokens)
        clock.times.attention_s += job.elapsed_s
        clock.times.kv_read_bytes += job.kv_read_bytes
        return out
