"""Measures the CPU worker's attention through the channel that serves."""

import statistics
from collections.abc import Iterator

import numpy as np
import torch

from gpu_worker.activations import SlotTensors
from gpu_worker.fit import fit
from gpu_worker.measuring import Effort, Measured, quality
from gpu_worker.port import ITEM
from gpu_worker.runtime import LoadedModel
from gpu_worker.session import BLOCK_TOKENS
from native.channel import DevicePort


class AttentionProfiler:
    """Jobs of one layer at a time over a KV cache that nobody else uses."""

    def __init__(self, model: LoadedModel, port: DevicePort, effort: Effort) -> None:
        self._model = model
        self._effort = effort
        self._port = port
        self._slot = SlotTensors(port, 0)
        self._next_layer = 0

    def decode(self) -> Measured:
        """Decode: t = fixed + per sequence + KV bytes / rate, in one layer."""
        features, times_s = [], []
        for n_sequences, context in self.decode_shapes():
            self.prepare(n_sequences, start=context - 1, n_tokens=1)
            jobs = [self.job() for _ in range(2 * self._effort.repeats)][1:]
            features.append((1.0, float(n_sequences), statistics.median(b for _, b in jobs)))
            times_s.append(statistics.median(t for t, _ in jobs))
        if len(features) < 3:
            return Measured({}, "the KV cache is too small to measure decode")
        line = fit(features, times_s)
        fixed_s, sequence_s, byte_s = line.coefficients
        values = {"attention_fixed_s": fixed_s, "attention_sequence_s": sequence_s}
        if byte_s > 0:
            values["attention_bytes_per_s"] = 1 / byte_s
        return Measured(values, quality(f"{len(times_s)} shapes of decode", line))

    def prefill(self) -> Measured:
        """Seconds for a pair of query and KV token inside a chunk."""
        longest = min(512, self._capacity_tokens(), self._model.worker.max_step_tokens)
        features, times_s = [], []
        for n in self._effort.ladder(min(32, longest), longest):
            self.prepare(1, start=0, n_tokens=n)
            jobs = [self.job() for _ in range(self._effort.repeats + 1)][1:]
            features.append((1.0, n * (n + 1) / 2))
            times_s.append(statistics.median(t for t, _ in jobs))
        if len(features) < 2:
            return Measured({}, "the KV cache is too small to measure prefill")
        line = fit(features, times_s)
        return Measured({"attention_pair_s": line.coefficients[1]}, quality("chunks", line))

    def _capacity_tokens(self) -> int:
        """Tokens of one sequence that KV cache and context length allow."""
        blocks = min(self._model.kv_blocks, self._model.config.max_context_tokens // BLOCK_TOKENS)
        return max(1, blocks) * BLOCK_TOKENS

    def decode_shapes(self) -> Iterator[tuple[int, int]]:
        """(sequences, context): few and many, short and long, as far as the KV cache goes."""
        worker = self._model.worker
        most = min(worker.max_sequences, worker.max_step_tokens, self._model.kv_blocks, 256)
        contexts = self._effort.ladder(16, min(2048, self._capacity_tokens()))
        for n_sequences in sorted({1, *self._effort.ladder(min(8, most), most)}):
            for context in contexts:
                if n_sequences * (context // BLOCK_TOKENS) <= self._model.kv_blocks:
                    yield n_sequences, context

    def prepare(self, n_sequences: int, start: int, n_tokens: int) -> None:
        """Sequences of equal length, their blocks strewn over the arena."""
        per_sequence = -(-(start + n_tokens) // BLOCK_TOKENS)
        order = np.random.default_rng(0).permutation(self._model.kv_blocks)
        for row in range(n_sequences):
            self._port.set_blocks(row, 0, order[row * per_sequence : (row + 1) * per_sequence])
        items = np.zeros(n_sequences, dtype=ITEM)
        items["row"] = np.arange(n_sequences)
        items["start_position"], items["n_tokens"] = start, n_tokens
        items["slot_offset"] = np.arange(n_sequences) * n_tokens
        self._port.prepare(0, items)
        for part in (self._slot.q, self._slot.k, self._slot.v):
            rows = part[: n_sequences * n_tokens]
            rows.copy_(torch.randn(rows.shape))

    def job(self) -> tuple[float, int]:
        """Seconds and KV bytes of a job; layers take turns, so that no KV is in a cache."""
        self._port.post(0, self._next_layer)
        self._next_layer = (self._next_layer + 1) % self._model.config.n_layers
        times = self._port.wait(0, 60.0)
        return times.elapsed_s, times.kv_read_bytes
