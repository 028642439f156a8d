"""How a GPU worker runs; every value comes from a flag of `moe-lens gpu-worker` or its variable."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker import memory
from gpu_worker.errors import ConfigurationError, MemoryShortage
from gpu_worker.families import DecoderConfig
from gpu_worker.options import DEFAULT_PACKET_BYTES
from native.segment import BLOCK_TOKENS, ChannelGeometry, KvDtype
from protos.serving import ClientTls, ServingConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KV_DTYPES = ("auto", "int8")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("auto", "sequential", "pipelined")
# Without --kv: this share of what is free, and no more than fills up when every so manieth of the
# sequences is as long as it can be.
DEFAULT_KV_SHARE = 0.4
FULL_SEQUENCES_SHARE = 4


@dataclass(frozen=True)
class WorkerConfig:
    """Everything that decides what a worker loads and how it computes."""

    serving: ServingConfig
    cpu_worker: str  # address
    model: Path
    peer_tls: ClientTls | None = None  # towards a CPU worker on TCP
    kv_bytes: int | None = None  # None: chosen from what is free
    dtype: str | None = None  # None: the checkpoint's
    kv_dtype: str = "auto"  # as computed
    device: str = "auto"
    max_step_tokens: int = 2048
    max_sequences: int = 1024
    threads: int | None = None  # of device cpu; None: all cores
    hardware: Path | None = None
    measure: bool = True  # at the start, where there is no profile
    shm_dir: Path = Path("/dev/shm")  # where the CPU worker keeps the KV cache
    peer_timeout_s: float = 5.0
    schedule: str = "auto"
    # Device memory that may hold stages for good; None: what is free on it.
    resident_bytes: int | None = None
    packet_bytes: int = DEFAULT_PACKET_BYTES
    # Device cpu plays a device with memory of its own behind a link of this rate.
    emulate_link_bytes_per_s: float | None = None
    emulate_device_memory_bytes: int | None = None
    timeline: Path | None = None
    checksums: bool = False

    def __post_init__(self) -> None:
        self._check_choices()
        for name in ("max_step_tokens", "max_sequences", "threads", "packet_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(name, f"must be at least 1, is {value}")
        for name in ("peer_timeout_s", "emulate_link_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(name, f"must be above 0, is {value}")
        self._check_link()

    def _check_choices(self) -> None:
        choices = {
            "dtype": (None, *DTYPES),
            "kv_dtype": KV_DTYPES,
            "device": DEVICES,
            "schedule": SCHEDULES,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join(choice for choice in allowed if choice)
                raise ConfigurationError(name, f"must be one of {known}, is {value!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("device", "cuda is not available here; use cpu")

    def _check_link(self) -> None:
        """Settings of a link or of device memory make sense where there is one."""
        emulated = self.emulate_link_bytes_per_s is not None
        if emulated and self.resolved_device != "cpu":
            raise ConfigurationError("emulate_link_gb_per_s", "works on device cpu only")
        if not emulated and self.emulate_device_memory_bytes is not None:
            raise ConfigurationError("emulate_device_memory", "needs emulate_link_gb_per_s")
        if not self.has_link and self.resident_bytes is not None:
            raise ConfigurationError("resident", "the CPU computes in host memory: nothing moves")

    @property
    def has_link(self) -> bool:
        """Whether the device has memory of its own."""
        return self.resolved_device == "cuda" or self.emulate_link_bytes_per_s is not None

    @property
    def pipelined(self) -> bool:
        """Whether two groups overlap: worth it unless both sides share the cores."""
        return self.has_link if self.schedule == "auto" else self.schedule == "pipelined"

    @property
    def resolved_device(self) -> str:
        """ "cpu" or "cuda"."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(asked: str | None, of_checkpoint: torch.dtype) -> torch.dtype:
    """What to compute in. FP16 weights are exact in neither type but FP32, so that one must ask."""
    if asked is not None:
        return DTYPES[asked]
    if of_checkpoint in DTYPE_NAMES:
        return of_checkpoint
    raise ConfigurationError(
        "dtype",
        "the checkpoint is FP16; choose bf16 (rounded weights) or fp32 (exact, twice the memory)",
    )


def choose_kv_dtype(asked: str, dtype: torch.dtype) -> KvDtype:
    """What the KV cache holds. Activations of an INT8 cache are BF16, so the rest must be too."""
    if asked == "auto":
        return "bf16" if dtype == torch.bfloat16 else "fp32"
    if dtype != torch.bfloat16:
        raise ConfigurationError("kv_dtype", "int8 goes with --dtype bf16 only")
    return "int8"


def geometry(
    config: WorkerConfig, decoder: DecoderConfig, dtype: torch.dtype, kv_blocks: int
) -> ChannelGeometry:
    """What the CPU worker is asked for."""
    return ChannelGeometry(
        n_layers=decoder.n_layers,
        n_q_heads=decoder.n_q_heads,
        n_kv_heads=decoder.n_kv_heads,
        head_dim=decoder.head_dim,
        kv_dtype=choose_kv_dtype(config.kv_dtype, dtype),
        kv_blocks=kv_blocks,
        max_sequences=config.max_sequences,
        max_context_tokens=decoder.max_context_tokens,
        max_slot_tokens=config.max_step_tokens,
        n_processes=1,
        scale=decoder.head_dim**-0.5,
        checksums=config.checksums,
    )


def choose_kv_blocks(
    config: WorkerConfig, decoder: DecoderConfig, dtype: torch.dtype, weights_bytes: int
) -> int:
    """KV blocks of --kv, or of what is free beside the weights. MemoryShortage, itemised, where
    they fit neither RAM nor the CPU worker's directory."""
    one = geometry(config, decoder, dtype, kv_blocks=1).sizes()
    shared_bytes = memory.free_shared_bytes(config.shm_dir)
    ram_bytes = memory.available_bytes()
    if config.kv_bytes is None:
        beside = one.segment_bytes + memory.HEADROOM_BYTES
        usable_bytes = min(ram_bytes - weights_bytes, shared_bytes) - beside
        per_sequence = memory.div_ceil(decoder.max_context_tokens, BLOCK_TOKENS)
        most = memory.div_ceil(config.max_sequences, FULL_SEQUENCES_SHARE) * per_sequence
        blocks = min(int(usable_bytes * DEFAULT_KV_SHARE) // one.kv_arena_bytes, most)
    else:
        blocks = config.kv_bytes // one.kv_arena_bytes
        if blocks < 1:
            raise ConfigurationError(
                "kv",
                f"{config.kv_bytes} bytes hold no block of {one.kv_arena_bytes} bytes (16 tokens)",
            )
    shared = [
        ("KV cache", max(blocks, 1) * one.kv_arena_bytes),
        ("channel segment", one.segment_bytes),
    ]
    host = [("weights", weights_bytes), *shared, ("headroom", memory.HEADROOM_BYTES)]
    for what, items, free in (("RAM", host, ram_bytes), (config.shm_dir, shared, shared_bytes)):
        if sum(n for _, n in items) > free:
            raise MemoryShortage(f"not enough of {what} for this model", items, free)
    return blocks
