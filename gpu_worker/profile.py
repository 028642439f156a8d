"""Measures this machine with one model: what the planner's cost terms need, and how well they fit.

Everything is measured through the parts that serve: the device's operations on the real weights,
the data mover's link, jobs of the CPU worker's attention processes.
"""

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from gpu_worker.activations import SlotTensors
from gpu_worker.fit import LinearFit, fit
from gpu_worker.memory import allocate
from gpu_worker.port import ITEM
from gpu_worker.runtime import LoadedModel, activations_of
from gpu_worker.session import BLOCK_TOKENS
from gpu_worker.weights import BlockWeights
from native.channel import DevicePort
from native.host_memory import read_bandwidth_bytes_per_s
from planner.hardware import HardwareSpec
from planner.spec import ModelSpec

REPEATS = 5
DOWNLOAD_BYTES = 64 << 20
# Without a link a step should be so large that its fixed cost is this share of it.
FIXED_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Measured:
    """Values of HardwareSpec with what is to be said of each."""

    values: dict[str, float]
    source: str


def profile(model: LoadedModel, port: DevicePort) -> tuple[HardwareSpec, list[Measured]]:
    """Measure everything; the engine must not be in use. Fields that there is no way to measure
    here (a link, where the device has none) stay unknown."""
    profiler = Profiler(model, port)
    found = [
        profiler.device_time(),
        profiler.head_time(),
        profiler.attention(),
        profiler.prefill_attention(),
        Measured({"host_read_bytes_per_s": read_bandwidth_bytes_per_s()}, "sequential, all cores"),
    ]
    if model.device.link is not None:
        found += [profiler.link(), profiler.slowdown()]
    spec = ModelSpec.from_directory(model.worker.model)
    found.append(derived(model, spec, {k: v for m in found for k, v in m.values.items()}))
    hardware = dataclasses.replace(
        model.hardware, device=model.device.name, profiled_model=spec.name
    )
    for measured in found:
        hardware = hardware.with_values("measured", measured.source, **measured.values)
    return hardware, found


def derived(model: LoadedModel, spec: ModelSpec, values: dict[str, float]) -> Measured:
    """Sustained FLOP/s, and the tokens that a step should have.

    n_real: where the device's time for a layer (both groups) equals the layer's transfer time; with
    nothing to stream, where the fixed part of the time is a tenth of the rest.
    """
    fixed_s, per_token_s = values["device_time_fixed_s"], values["device_time_per_token_s"]
    layer_flops = spec.layers_gemm_flops_per_token / spec.n_layers
    found = {"gpu_sustained_flops_per_s": layer_flops / per_token_s}
    rate = values.get("link_h2d_bytes_per_s")
    if rate is None:
        found["n_real_tokens"] = fixed_s / per_token_s / FIXED_SHARE
        return Measured(found, f"fixed part of a layer's time is {FIXED_SHARE:.0%} of the rest")
    groups = 2 if model.worker.pipelined else 1
    transfer_s = max(len(stage) for stage in _stages(model)) / rate
    found["n_real_tokens"] = max(0.0, transfer_s - groups * fixed_s) / per_token_s
    return Measured(found, "device time of a layer equals its transfer time")


class Profiler:
    """One model on one device with one CPU worker."""

    def __init__(self, model: LoadedModel, port: DevicePort) -> None:
        self._model = model
        self._port = port
        self._slot = SlotTensors(port, 0)
        self._next_layer = 0
        torch.manual_seed(0)

    # -- device -----------------------------------------------------------------------------------

    def device_time(self) -> Measured:
        """G(x) = a0 + a1 x of one layer over a ladder of token counts."""
        counts = list(_ladder(8, self._model.worker.max_step_tokens))
        times_s = [self._layer_s(n) for n in counts]
        line = fit([(1.0, n) for n in counts], times_s)
        values = dict(
            zip(("device_time_fixed_s", "device_time_per_token_s"), line.coefficients, strict=True)
        )
        return Measured(values, _quality(f"{counts[0]} to {counts[-1]} tokens", line))

    @torch.inference_mode()
    def _layer_s(self, n_tokens: int) -> float:
        """Median over the layers of GB and the next layer's GA."""
        model, config = self._model, self._model.config
        ops = model.device.ops
        x = torch.randn(n_tokens, config.hidden_size).to(ops.device, ops.dtype)
        attention = torch.randn(n_tokens, config.q_size).to(ops.device, ops.dtype)
        positions = torch.arange(n_tokens, dtype=torch.int32) % config.max_context_tokens
        positions = positions.to(ops.device)
        q, k, v = activations_of(self._slot, model.device).inputs(n_tokens)
        times_s: list[float] = []
        for _ in range(2):  # the first pass warms up
            times_s.clear()
            for stage in self._pass():
                begin_s = time.perf_counter()
                y = model.decoder.attention_out(x.clone(), attention, stage)
                if "qkv" in stage:
                    model.decoder.attention_in(y, stage, positions, q, k, v)
                    model.device.fence()()
                    times_s.append(time.perf_counter() - begin_s)
        return statistics.median(times_s)

    def _pass(self) -> Iterator[BlockWeights]:
        weights = self._model.weights
        weights.begin_pass()
        for layer in range(self._model.config.n_layers):
            yield weights.acquire(layer)
            weights.release(layer)

    def head_time(self) -> Measured:
        """Final norm, head and the greedy choice."""
        counts = list(_ladder(1, min(256, self._model.worker.max_step_tokens)))
        times_s = [self._head_s(n) for n in counts]
        line = fit([(1.0, n) for n in counts], times_s)
        values = dict(zip(("head_fixed_s", "head_token_s"), line.coefficients, strict=True))
        return Measured(values, _quality(f"{counts[0]} to {counts[-1]} tokens", line))

    @torch.inference_mode()
    def _head_s(self, n_tokens: int) -> float:
        model = self._model
        ops = model.device.ops
        x = torch.randn(n_tokens, model.config.hidden_size).to(ops.device, ops.dtype)

        def choose() -> None:
            model.decoder.argmax(model.decoder.logits(model.weights.base, x)).tolist()

        return _median_s(choose)

    # -- attention --------------------------------------------------------------------------------

    def attention(self) -> Measured:
        """Decode: t = fixed + per sequence + KV bytes / rate, in one layer."""
        features, times_s = [], []
        for n_sequences, context in self._decode_shapes():
            self._prepare(n_sequences, start=context - 1, n_tokens=1)
            jobs = [self._job() for _ in range(2 * REPEATS)][1:]
            features.append((1.0, float(n_sequences), statistics.median(b for _, b in jobs)))
            times_s.append(statistics.median(t for t, _ in jobs))
        line = fit(features, times_s)
        fixed_s, sequence_s, byte_s = line.coefficients
        values = {"attention_fixed_s": fixed_s, "attention_sequence_s": sequence_s}
        if byte_s > 0:
            values["attention_bytes_per_s"] = 1 / byte_s
        return Measured(values, _quality(f"{len(times_s)} shapes of decode", line))

    def prefill_attention(self) -> Measured:
        """Seconds for a pair of query and KV token inside a chunk."""
        longest = min(512, self._capacity_tokens(), self._model.worker.max_step_tokens)
        features, times_s = [], []
        for n in _ladder(32, longest):
            self._prepare(1, start=0, n_tokens=n)
            jobs = [self._job() for _ in range(REPEATS)][1:]
            features.append((1.0, n * (n + 1) / 2))
            times_s.append(statistics.median(t for t, _ in jobs))
        if len(features) < 2:
            return Measured({}, "the KV cache is too small to measure prefill")
        line = fit(features, times_s)
        return Measured({"attention_pair_s": line.coefficients[1]}, _quality("chunks", line))

    def _capacity_tokens(self) -> int:
        """Tokens of one sequence that KV cache and context length allow."""
        blocks = min(self._model.kv_blocks, self._model.config.max_context_tokens // BLOCK_TOKENS)
        return max(1, blocks) * BLOCK_TOKENS

    def _decode_shapes(self) -> Iterator[tuple[int, int]]:
        """(sequences, context): few and many, short and long, as far as the KV cache goes."""
        worker = self._model.worker
        for n_sequences in (1, 8, 64, 256):
            for context in (16, 128, 512, 2048):
                blocks = n_sequences * (context // BLOCK_TOKENS)
                fits = blocks <= self._model.kv_blocks and context <= self._capacity_tokens()
                if fits and n_sequences <= min(worker.max_sequences, worker.max_step_tokens):
                    yield n_sequences, context

    def _prepare(self, n_sequences: int, start: int, n_tokens: int) -> None:
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

    def _job(self) -> tuple[float, int]:
        """Seconds and KV bytes of a job; layers take turns, so that no KV is in a cache."""
        self._port.post(0, self._next_layer)
        self._next_layer = (self._next_layer + 1) % self._model.config.n_layers
        times = self._port.wait(0, 60.0)
        return times.elapsed_s, times.kv_read_bytes

    # -- link -------------------------------------------------------------------------------------

    def link(self) -> Measured:
        """Bytes/s of weights to the device and of a large copy back."""
        link = self._model.device.link
        assert link is not None
        source = self._model.device.allocate(DOWNLOAD_BYTES)
        target = allocate(DOWNLOAD_BYTES)
        self._model.device.register(target.data_ptr(), len(target))
        down_s = _median_s(lambda: link.download(target, source))
        return Measured(
            {
                "link_h2d_bytes_per_s": self._stream_rate(),
                "link_d2h_bytes_per_s": DOWNLOAD_BYTES / down_s,
            },
            "packets of weights; one large copy back",
        )

    def slowdown(self) -> Measured:
        """κ: what of the attention's time a transfer beside it takes longer."""
        alone_s = 1 / self._stream_rate()
        shapes = list(self._decode_shapes())
        n_sequences, context = max(shapes, key=lambda shape: shape[0] * shape[1])
        self._prepare(n_sequences, start=context - 1, n_tokens=1)
        busy_s, beside_s, n_bytes = self._stream_beside_attention()
        share = (beside_s - alone_s * n_bytes) / min(busy_s, beside_s)
        return Measured(
            {"link_slowdown": min(max(share, 0.0), 0.99)},
            f"weights streamed beside decode of {n_sequences} sequences of {context} tokens",
        )

    def _stream_rate(self) -> float:
        before = self._model.weights.stats()
        for _ in range(3):
            for _ in self._pass():
                pass
        after = self._model.weights.stats()
        return (after.moved_bytes - before.moved_bytes) / (after.busy_s - before.busy_s)

    def _stream_beside_attention(self) -> tuple[float, float, int]:
        """Attention's seconds, and seconds and bytes of the link meanwhile."""
        before = self._model.weights.stats()
        passes = threading.Thread(target=lambda: [None for _ in range(3) for _ in self._pass()])
        passes.start()
        busy_s = 0.0
        while passes.is_alive():
            busy_s += self._job()[0]
        passes.join()
        after = self._model.weights.stats()
        return busy_s, after.busy_s - before.busy_s, after.moved_bytes - before.moved_bytes


def _stages(model: LoadedModel) -> list[torch.Tensor]:
    return [model.store.stage_bytes(i) for i in range(model.config.n_layers)]


def _ladder(first: int, last: int) -> Iterator[int]:
    """first, twice that, …, and last."""
    while first < last:
        yield first
        first *= 2
    yield last


def _median_s(work: Callable[[], object]) -> float:
    """Median seconds of a piece of work, after one that warms up."""
    times_s = []
    for _ in range(REPEATS + 1):
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[1:])


def _quality(what: str, line: LinearFit) -> str:
    return f"{what}; line fits within {line.mean_error:.1%} on average, {line.worst_error:.1%}"
