"""The model as it lies in memory, and one epoch of it: an engine over one channel segment."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from gpu_worker import config as configuration
from gpu_worker import weights
from gpu_worker.activations import SharedActivations, SlotTensors
from gpu_worker.checkpoint import Checkpoint
from gpu_worker.config import WorkerConfig
from gpu_worker.cpu_ops import CpuOps
from gpu_worker.engine import Engine
from gpu_worker.errors import CheckpointError, ConfigurationError
from gpu_worker.families import DecoderConfig, family_of
from gpu_worker.model import Decoder
from gpu_worker.ops import Ops, TorchOps
from gpu_worker.session import BLOCK_TOKENS, SessionLimits
from gpu_worker.streaming import StageWeights, WeightsInPlace
from gpu_worker.weights import LoadProgress
from native.channel import DevicePort
from native.segment import SLOTS, ChannelGeometry
from native.threads import ThreadPool
from planner.hardware import HardwareSpec


@dataclass(frozen=True)
class LoadedModel:
    """What survives the CPU worker: config, weights and the operations over them."""

    worker: WorkerConfig
    checkpoint: Checkpoint
    config: DecoderConfig
    decoder: Decoder
    ops: Ops
    weights: StageWeights
    kv_blocks: int
    hardware: HardwareSpec

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
        return configuration.geometry(self.worker, self.config, self.ops.dtype, self.kv_blocks)

    @property
    def preferred_step_tokens(self) -> int:
        """n_real where it was measured, else the largest step."""
        n_real = self.hardware.value("n_real_tokens")
        limit = self.worker.max_step_tokens
        return limit if n_real is None else max(BLOCK_TOKENS, min(limit, round(n_real)))

    @property
    def schedule(self) -> str:
        """ "sequential" or "pipelined"."""
        return "sequential"

    @property
    def resident_share(self) -> float:
        """Share of the weights that never moves."""
        return 1.0

    def engine(self, port: DevicePort) -> Engine:
        """A new engine over a segment."""
        activations = [SharedActivations(SlotTensors(port, slot)) for slot in range(SLOTS)]
        return Engine(self.decoder, self.weights, port, activations, self.ops.device)


def load(worker: WorkerConfig, progress: LoadProgress) -> LoadedModel:
    """Check everything that can be checked, then load.

    CheckpointError, ConfigurationError and MemoryShortage say what is wrong before memory is taken.
    """
    checkpoint = Checkpoint(worker.model)
    family, config = _decoder_config(checkpoint)
    dtype = configuration.choose_dtype(worker.dtype, checkpoint.dtype())
    hardware = load_hardware(worker.hardware)
    ops = make_ops(worker, dtype)
    kv_blocks = configuration.choose_kv_blocks(worker, config, dtype)
    store = weights.load(checkpoint, family, config, ops, progress)
    decoder = Decoder(config, ops)
    in_place = WeightsInPlace(store, ops)
    return LoadedModel(worker, checkpoint, config, decoder, ops, in_place, kv_blocks, hardware)


def make_ops(worker: WorkerConfig, dtype: torch.dtype) -> Ops:
    """The operations of the device that the configuration asks for."""
    if worker.resolved_device == "cuda":
        return TorchOps(dtype, torch.device("cuda"))
    # Our kernels have threads of their own; torch's would spin beside them.
    torch.set_num_threads(1)
    return CpuOps(dtype, ThreadPool(worker.threads))


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
