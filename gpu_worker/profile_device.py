"""Measures the device, its link and the host's memory, on the weights that serve."""

import statistics
import time
from collections.abc import Iterator
from itertools import accumulate

import torch

from gpu_worker.activations import SlotTensors
from gpu_worker.fit import fit
from gpu_worker.measuring import Effort, Measured, quality
from gpu_worker.memory import allocate
from gpu_worker.mover import MoverStats
from gpu_worker.runtime import LoadedModel, activations_of
from gpu_worker.weights import BlockWeights
from native.channel import DevicePort
from native.host_memory import read_bandwidth_bytes_per_s


class DeviceProfiler:
    """One model on one device; the engine must not be in use."""

    def __init__(self, model: LoadedModel, port: DevicePort, effort: Effort) -> None:
        self._model = model
        self._effort = effort
        self._slot = SlotTensors(port, 0)
        torch.manual_seed(0)

    def device_time(self) -> Measured:
        """G(x) = a0 + a1 x of one layer over a ladder of token counts."""
        counts = self._effort.ladder(8, self._model.worker.max_step_tokens)
        times_s = [self._layer_s(n) for n in counts]
        line = fit([(1.0, n) for n in counts], times_s)
        fixed_s, per_token_s = line.coefficients
        if per_token_s == 0:  # a disturbed measurement of a tiny model
            fixed_s, per_token_s = 0.0, times_s[-1] / counts[-1]
        values = {"device_time_fixed_s": fixed_s, "device_time_per_token_s": per_token_s}
        # More tokens never take less time; what says so is noise.
        points = tuple(zip(map(float, counts), accumulate(times_s, max), strict=True))
        return Measured(values, quality(f"{counts[0]} to {counts[-1]} tokens", line), points)

    @torch.inference_mode()
    def _layer_s(self, n_tokens: int) -> float:
        """Median of GB and the next layer's GA, over as many layers as there is time for."""
        model, config = self._model, self._model.config
        ops = model.device.ops
        x = torch.randn(n_tokens, config.hidden_size).to(ops.device, ops.dtype)
        attention = torch.randn(n_tokens, config.q_size).to(ops.device, ops.dtype)
        positions = torch.arange(n_tokens, dtype=torch.int32) % config.max_context_tokens
        positions = positions.to(ops.device)
        q, k, v = activations_of(self._slot, model.device).inputs(n_tokens)

        def layer(stage: BlockWeights) -> None:
            y = model.decoder.attention_out(x.clone(), attention, stage)
            if "qkv" in stage:
                model.decoder.attention_in(y, stage, positions, q, k, v)
            model.device.fence()()

        times_s: list[float] = []
        for i in range(3):  # the first pass warms up
            for stage in self.whole_pass():
                begin_s = time.perf_counter()
                layer(stage)
                if "qkv" in stage or config.n_layers == 1:
                    times_s.append(time.perf_counter() - begin_s)
                if i == 0 or sum(times_s) > self._effort.point_s:
                    break
        return statistics.median(times_s[1:] or times_s)

    def whole_pass(self) -> Iterator[BlockWeights]:
        """Every stage's weights in turn, each let go when the next is asked for."""
        weights = self._model.weights
        weights.begin_pass()
        for layer in range(self._model.config.n_layers):
            yield weights.acquire(layer)
            weights.release(layer)

    def head_time(self) -> Measured:
        """Final norm, head and the greedy choice."""
        counts = self._effort.ladder(1, min(256, self._model.worker.max_step_tokens))
        times_s = [self._head_s(n) for n in counts]
        line = fit([(1.0, n) for n in counts], times_s)
        values = dict(zip(("head_fixed_s", "head_token_s"), line.coefficients, strict=True))
        return Measured(values, quality(f"{counts[0]} to {counts[-1]} tokens", line))

    @torch.inference_mode()
    def _head_s(self, n_tokens: int) -> float:
        model = self._model
        ops = model.device.ops
        x = torch.randn(n_tokens, model.config.hidden_size).to(ops.device, ops.dtype)

        def choose() -> None:
            model.decoder.argmax(model.decoder.logits(model.weights.base, x)).tolist()

        return self._effort.median_s(choose)

    def host_memory(self) -> Measured:
        """Sequential reads by all cores."""
        rate = read_bandwidth_bytes_per_s(
            size_bytes=self._effort.read_bytes, repeats=self._effort.repeats
        )
        return Measured({"host_read_bytes_per_s": rate}, "sequential, all cores")

    def link(self) -> Measured:
        """Bytes/s of weights to the device and of a large copy back."""
        link = self._model.device.link
        assert link is not None
        source = self._model.device.allocate(self._effort.download_bytes)
        target = allocate(self._effort.download_bytes)
        self._model.device.register(target.data_ptr(), len(target))
        down_s = self._effort.median_s(lambda: link.download(target, source))
        values = {"link_d2h_bytes_per_s": self._effort.download_bytes / down_s}
        rate = self.stream_rate()
        if rate is not None:
            values["link_h2d_bytes_per_s"] = rate
        return Measured(values, "packets of weights; one large copy back")

    def stream_rate(self) -> float | None:
        """Bytes/s of the weights' packets, so far where the effort allows no passes of its own;
        None where nothing is streamed."""
        weights = self._model.weights
        before = weights.stats() if self._effort.link_passes else MoverStats()
        for _ in range(self._effort.link_passes):
            for _ in self.whole_pass():
                pass
        after = weights.stats()
        moved_bytes = after.moved_bytes - before.moved_bytes
        return moved_bytes / (after.busy_s - before.busy_s) if moved_bytes else None
