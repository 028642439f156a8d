"""How a worker computes, as options; shared by `moe-lens gpu-worker` and `moe-lens profile`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.errors import InvalidInputError
from planner.units import parse_bytes

DEFAULT_PACKET_BYTES = 100_000_000


def size(text: str) -> int:
    """Bytes from text such as "64 GiB"; a usage error where it is none."""
    try:
        return parse_bytes(text)
    except InvalidInputError as error:
        raise typer.BadParameter(error.problem) from error


def _option(text: str, variable: str, **extra: Any) -> Any:
    return typer.Option(help=text, envvar=f"MOE_LENS_{variable}", **extra)


def _size_option(text: str, variable: str) -> Any:
    return _option(text, variable, parser=size, metavar="SIZE")


@dataclass(frozen=True)
class ComputeOptions:
    """Fields are named as the options; `settings` names them as WorkerConfig does."""

    kv: Annotated[
        int | None,
        _size_option("Size of the KV cache, e.g. 64GiB; by default 40 % of what is free.", "KV"),
    ] = None
    dtype: Annotated[str | None, _option("bf16 or fp32; by default the checkpoint's.", "DTYPE")] = (
        None
    )
    kv_dtype: Annotated[
        str,
        _option("auto (as computed) or int8: half the KV cache's bytes, rounded.", "KV_DTYPE"),
    ] = "auto"
    device: Annotated[str, _option("auto, cpu or cuda.", "DEVICE")] = "auto"
    max_step_tokens: Annotated[int, _option("Tokens of one step.", "MAX_STEP_TOKENS")] = 2048
    max_sequences: Annotated[int, _option("Sequences that run at once.", "MAX_SEQUENCES")] = 1024
    threads: Annotated[
        int | None, _option("Threads of device cpu; by default all cores.", "THREADS")
    ] = None
    shm_dir: Annotated[Path, _option("Where the CPU worker keeps the KV cache.", "SHM_DIR")] = Path(
        "/dev/shm"
    )
    peer_timeout_s: Annotated[
        float, _option("Silence after which the CPU worker counts as hung.", "PEER_TIMEOUT_S")
    ] = 5.0
    schedule: Annotated[
        str,
        _option("auto, sequential or pipelined (CPU and device at the same time).", "SCHEDULE"),
    ] = "auto"
    resident: Annotated[
        int | None,
        _size_option(
            "Device memory for layers that are not streamed; by default what is free.", "RESIDENT"
        ),
    ] = None
    packet: Annotated[
        int | None, _size_option("Largest copy of weights at once; by default 100 MB.", "PACKET")
    ] = None
    emulate_link_gb_per_s: Annotated[
        float | None,
        _option(
            "Device cpu: stream the weights over a link of this rate.", "EMULATE_LINK_GB_PER_S"
        ),
    ] = None
    emulate_device_memory: Annotated[
        int | None, _size_option("Memory of that device.", "EMULATE_DEVICE_MEMORY")
    ] = None

    checksums: Annotated[
        bool,
        _option("Verify KV blocks and activations whenever they are read (slow).", "CHECKSUMS"),
    ] = False

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of WorkerConfig."""
        link_gb_per_s = self.emulate_link_gb_per_s
        return {
            "kv_bytes": self.kv,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "device": self.device,
            "max_step_tokens": self.max_step_tokens,
            "max_sequences": self.max_sequences,
            "threads": self.threads,
            "shm_dir": self.shm_dir,
            "peer_timeout_s": self.peer_timeout_s,
            "schedule": self.schedule,
            "resident_bytes": self.resident,
            "packet_bytes": DEFAULT_PACKET_BYTES if self.packet is None else self.packet,
            "emulate_link_bytes_per_s": None if link_gb_per_s is None else link_gb_per_s * 1e9,
            "checksums": self.checksums,
            "emulate_device_memory_bytes": self.emulate_device_memory,
        }
