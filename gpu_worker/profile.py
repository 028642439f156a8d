"""Measures this machine with one model: what the planner's cost terms need, and how well they fit.

Everything is measured through the parts that serve: the device's operations on the real weights,
the data mover's link, jobs of the CPU worker's attention processes.
"""

import dataclasses
import threading

from gpu_worker.measuring import QUICK, THOROUGH, Effort, Measured
from gpu_worker.profile_attention import AttentionProfiler
from gpu_worker.profile_device import DeviceProfiler
from gpu_worker.runtime import LoadedModel
from native.channel import DevicePort
from planner.hardware import Curve, HardwareSpec
from planner.spec import ModelSpec

# A step should at least be so large that its fixed cost is this share of the rest.
FIXED_SHARE = 0.05


def profile(
    model: LoadedModel, port: DevicePort, effort: Effort = THOROUGH
) -> tuple[HardwareSpec, list[Measured]]:
    """Measure everything; the engine must not be in use. Fields that there is no way to measure
    here (a link, where the device has none) stay unknown."""
    device = DeviceProfiler(model, port, effort)
    attention = AttentionProfiler(model, port, effort)
    found = [
        device.device_time(),
        device.head_time(),
        attention.decode(),
        attention.prefill(),
        device.host_memory(),
    ]
    if model.device.link is not None:
        found.append(device.link())
        if effort.link_passes and model.weights.stats().moved_bytes:
            found.append(slowdown(device, attention, model))
    spec = ModelSpec.from_directory(model.worker.model)
    found.append(derived(model, spec, {k: v for m in found for k, v in m.values.items()}))
    hardware = dataclasses.replace(
        model.hardware, device=model.device.name, profiled_model=spec.name
    )
    for measured in found:
        source = f"{effort.name}: {measured.source}"
        hardware = hardware.with_values("measured", source, **measured.values)
        if len(measured.device_time) > 1:
            curve = Curve(measured.device_time, "measured", source)
            hardware = dataclasses.replace(hardware, device_time_curve=curve)
    return hardware, found


def with_short_profile(model: LoadedModel, port: DevicePort) -> LoadedModel:
    """The model with what a second of measuring tells of the machine."""
    hardware, _ = profile(model, port, QUICK)
    return dataclasses.replace(model, hardware=hardware)


def derived(model: LoadedModel, spec: ModelSpec, values: dict[str, float]) -> Measured:
    """Sustained FLOP/s, and the tokens that a step should have.

    n_real: where the fixed part of the device's time for a layer is a small part of the rest, but
    not less than where that time (of both groups) equals the layer's transfer time.
    """
    fixed_s, per_token_s = values["device_time_fixed_s"], values["device_time_per_token_s"]
    layer_flops = spec.layers_gemm_flops_per_token / spec.n_layers
    groups = 2 if model.worker.pipelined else 1
    efficient = groups * fixed_s / per_token_s / FIXED_SHARE
    found = {"gpu_sustained_flops_per_s": layer_flops / per_token_s, "n_real_tokens": efficient}
    efficiently = f"fixed part of a layer's time is {FIXED_SHARE:.0%} of the rest"
    rate = values.get("link_h2d_bytes_per_s")
    if rate is None:
        return Measured(found, efficiently)
    layer_bytes = sum(block.n_bytes for block in model.store.stages) / spec.n_layers
    transfer_s = layer_bytes * (1 - model.resident_share) / rate
    hidden = (transfer_s - groups * fixed_s) / per_token_s
    if hidden < efficient:
        return Measured(found, efficiently)
    found["n_real_tokens"] = hidden
    return Measured(found, "device time of a layer equals its transfer time")


def slowdown(device: DeviceProfiler, attention: AttentionProfiler, model: LoadedModel) -> Measured:
    """κ: what of the attention's time a transfer beside it takes longer."""
    rate = device.stream_rate()
    assert rate is not None
    alone_s = 1 / rate
    shapes = list(attention.decode_shapes())
    n_sequences, context = max(shapes, key=lambda shape: shape[0] * shape[1])
    attention.prepare(n_sequences, start=context - 1, n_tokens=1)
    busy_s, beside_s, n_bytes = _stream_beside(device, attention, model)
    share = (beside_s - alone_s * n_bytes) / min(busy_s, beside_s)
    return Measured(
        {"link_slowdown": min(max(share, 0.0), 0.99)},
        f"weights streamed beside decode of {n_sequences} sequences of {context} tokens",
    )


def _stream_beside(
    device: DeviceProfiler, attention: AttentionProfiler, model: LoadedModel
) -> tuple[float, float, int]:
    """Attention's seconds, and seconds and bytes of the link meanwhile."""
    before = model.weights.stats()

    def stream() -> None:
        for _ in range(THOROUGH.link_passes):
            for _ in device.whole_pass():
                pass

    passes = threading.Thread(target=stream)
    passes.start()
    busy_s = 0.0
    while passes.is_alive():
        busy_s += attention.job()[0]
    passes.join()
    after = model.weights.stats()
    return busy_s, after.busy_s - before.busy_s, after.moved_bytes - before.moved_bytes
