"""The model as it lies in memory, and one epoch of it: an engine over one channel segment."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from gpu_worker import config as configuration
from gpu_worker import residency, weights
from gpu_worker.activations import (
    Activations,
    CopiedActivations,
    SharedActivations,
    SlotTensors,
)
from gpu_worker.checkpoint import Checkpoint
from gpu_worker.config import WorkerConfig
from gpu_worker.cpu_ops import CpuOps
from gpu_worker.device import CpuDevice, CudaDevice, Device
from gpu_worker.engine import Engine, Schedule
from gpu_worker.errors import CheckpointError, ConfigurationError
from gpu_worker.families import DecoderConfig, family_of
from gpu_worker.groups import ChunkCosts
from gpu_worker.head import LOGIT_ROWS
from gpu_worker.link import EmulatedLink
from gpu_worker.model import Decoder
from gpu_worker.mover import Mover
from gpu_worker.ops import TorchOps
from gpu_worker.session import BLOCK_TOKENS, SessionLimits
from gpu_worker.streaming import StageWeights, WeightsInPlace
from gpu_worker.timing import Timeline
from gpu_worker.weights import HostStore, LoadProgress
from native.channel import DevicePort
from native.segment import SLOTS, ChannelGeometry
from native.threads import ThreadPool
from planner.hardware import HardwareSpec

# Device without a link: the fewest tokens of a full step, and the time that one may take.
LEAST_STEP_TOKENS = 512
FULL_STEP_S = 2.5


@dataclass(frozen=True)
class LoadedModel:
    """What survives the CPU worker: config, weights and the operations over them."""

    worker: WorkerConfig
    checkpoint: Checkpoint
    config: DecoderConfig
    decoder: Decoder
    device: Device
    store: HostStore
    weights: StageWeights
    resident_share: float
    kv_blocks: int
    hardware: HardwareSpec
    timeline: Timeline | None

    @property
    def limits(self) -> SessionLimits:
        """What a plan may ask for."""
        return SessionLimits(
            vocab_size=self.config.vocab_size,
            max_context_tokens=self.config.max_context_tokens,
            max_step_tokens=self.worker.max_step_tokens,
            max_sequences=self.worker.max_sequences,
            kv_blocks=self.kv_blocks,
        )

    @property
    def geometry(self) -> ChannelGeometry:
        """What the CPU worker is asked for."""
        return configuration.geometry(self.worker, self.config, self.dtype, self.kv_blocks)

    @property
    def is_profiled(self) -> bool:
        """Whether the machine's times with a model are known."""
        return self.hardware.value("device_time_per_token_s") is not None

    @property
    def preferred_step_tokens(self) -> int:
        """n_real where it was measured, else the largest step.

        With nothing to stream a larger step is never slower: the experts' products gain from more
        rows long after the weights are read in no time. It then has as many tokens as it computes
        in FULL_STEP_S, so that others wait no longer for a turn, and not less than n_real or what a
        short, disturbed measurement must not make smaller.
        """
        n_real = self.hardware.value("n_real_tokens")
        per_token_s = self.hardware.value("device_time_per_token_s")  # of one layer
        limit = self.worker.max_step_tokens
        if n_real is None:
            return limit
        least = BLOCK_TOKENS
        if self.device.link is None:
            least = LEAST_STEP_TOKENS
            if per_token_s:
                least = max(least, int(FULL_STEP_S / (per_token_s * self.config.n_layers)))
        return min(limit, max(least, round(n_real)))

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.device.ops.dtype

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of a token in one layer."""
        arena_bytes = self.geometry.sizes().kv_arena_bytes
        return arena_bytes / (self.kv_blocks * BLOCK_TOKENS * self.config.n_layers)

    @property
    def schedule(self) -> Schedule:
        """How batches go through the layers."""
        return Schedule(
            pipelined=self.worker.pipelined,
            chunks_on_device=self.device.name == "cuda",
            costs=chunk_costs(self.hardware, self.kv_bytes_per_token),
        )

    def engine(self, port: DevicePort) -> Engine:
        """A new engine over a segment."""
        self.device.register(*port.activations)
        slots = [SlotTensors(port, slot) for slot in range(SLOTS)]
        return Engine(
            self.decoder,
            self.weights,
            port,
            [activations_of(slot, self.device) for slot in slots],
            self.device.ops.device,
            self.schedule,
            self.timeline,
        )

    def close(self) -> None:
        """Stop the data mover and write the timeline, where there is one."""
        self.weights.close()
        if self.timeline is not None and self.worker.timeline is not None:
            self.timeline.save(self.worker.timeline)


def activations_of(slot: SlotTensors, device: Device) -> Activations:
    """A slot as the device sees it."""
    if device.link is None:
        return SharedActivations(slot)
    return CopiedActivations(slot, device.link, device.ops.device)


def chunk_costs(hardware: HardwareSpec, kv_bytes_per_token: float) -> ChunkCosts:
    """Costs of a layer, whose KV of a token has so many bytes, from the profile; what that does not
    know keeps its default."""
    costs = ChunkCosts()
    per_token_s = hardware.value("device_time_per_token_s")
    rate = hardware.value("attention_bytes_per_s")
    if per_token_s is None or not rate:
        return costs
    return ChunkCosts(per_token_s, kv_bytes_per_token / rate)


def load(worker: WorkerConfig, progress: LoadProgress) -> LoadedModel:
    """Check everything that can be checked, then load.

    CheckpointError, ConfigurationError and MemoryShortage say what is wrong before memory is taken.
    """
    checkpoint = Checkpoint(worker.model)
    family, config = _decoder_config(checkpoint)
    dtype = configuration.choose_dtype(worker.dtype, checkpoint.dtype())
    hardware = load_hardware(worker.hardware)
    device = make_device(worker, dtype)
    weights_bytes = sum(weights.block_sizes(family, config, device.ops))
    kv_blocks = configuration.choose_kv_blocks(worker, config, dtype, weights_bytes)
    store = weights.load(checkpoint, family, config, device.ops, progress)
    timeline = Timeline() if worker.timeline is not None else None
    stages, resident_share = stage_weights(worker, config, store, device, timeline)
    return LoadedModel(
        worker=worker,
        checkpoint=checkpoint,
        config=config,
        decoder=Decoder(config, device.ops),
        device=device,
        store=store,
        weights=stages,
        resident_share=resident_share,
        kv_blocks=kv_blocks,
        hardware=hardware,
        timeline=timeline,
    )


def make_device(worker: WorkerConfig, dtype: torch.dtype) -> Device:
    """The device that the configuration asks for."""
    if worker.resolved_device == "cuda":
        return CudaDevice(TorchOps(dtype, torch.device("cuda")))
    # Our kernels have threads of their own; torch's would spin beside them.
    torch.set_num_threads(1)
    ops = CpuOps(dtype, ThreadPool(worker.threads))
    if worker.emulate_link_bytes_per_s is None:
        return CpuDevice(ops)
    link = EmulatedLink(worker.emulate_link_bytes_per_s)
    return CpuDevice(ops, link, worker.emulate_device_memory_bytes)


def stage_weights(
    worker: WorkerConfig,
    config: DecoderConfig,
    store: HostStore,
    device: Device,
    timeline: Timeline | None,
) -> tuple[StageWeights, float]:
    """Where the stages' weights are used from, and the share that stays on the device.

    MemoryShortage where the device cannot hold what it has to.
    """
    if device.link is None:
        return WeightsInPlace(store, device.ops), 1.0
    device.register(store.memory.data_ptr(), store.n_bytes)
    sizes = [block.n_bytes for block in store.stages]
    if worker.resident_bytes is not None:
        chosen = residency.choose(sizes, worker.resident_bytes)
    else:
        fixed = [
            ("embedding, head and the first layer's input", store.base.n_bytes),
            ("activations", device_activation_bytes(worker, config, device.ops.dtype)),
        ]
        chosen = residency.choose_for_memory(sizes, fixed, device.free_bytes())
    mover = Mover(store, device, chosen, worker.packet_bytes, timeline)
    return mover, chosen.resident_share


def device_activation_bytes(worker: WorkerConfig, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Device memory of a step: both slots, hidden states, and what the experts need in between."""
    slot = (2 * config.q_size + 2 * config.kv_size) * dtype.itemsize + 4 * config.n_q_heads
    states = 4 * config.hidden_size + config.q_size + 2 * config.kv_size
    experts = config.experts_per_token * (3 * config.expert_hidden_size + 2 * config.hidden_size)
    per_token = SLOTS * slot + (states + experts) * dtype.itemsize
    logits = min(worker.max_step_tokens, LOGIT_ROWS) * config.vocab_size * 4
    return worker.max_step_tokens * per_token + logits


def load_hardware(file: Path | None) -> HardwareSpec:
    """The profile of this machine, or what can be known of it without measuring."""
    if file is not None:
        return HardwareSpec.load(file)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HardwareSpec(name=platform.node() or "this machine").with_values(
        "measured",
        "read from the operating system",
        host_memory_bytes=float(memory_bytes),
        cpu_cores=float(len(os.sched_getaffinity(0))),
    )


def _decoder_config(checkpoint: Checkpoint) -> tuple[ModuleType, DecoderConfig]:
    try:
        family = family_of(checkpoint.config)
        return family, family.decoder_config(checkpoint.config)
    except ConfigurationError as error:
        raise CheckpointError(checkpoint.directory, [f"config.json: {error}"]) from error
