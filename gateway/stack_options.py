"""Options of the commands that start the services themselves: up, generate --model, demo."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.launcher import StackConfig, StackError

# Option → the services that are told, under the same name.
RECEIVERS = {
    "kv": ("gpu-worker",),
    "dtype": ("gpu-worker",),
    "kv_dtype": ("gpu-worker",),
    "device": ("gpu-worker",),
    "threads": ("gpu-worker",),
    "max_sequences": ("gpu-worker",),
    "max_step_tokens": ("gpu-worker", "gateway"),
    "hardware": ("gpu-worker",),
    "schedule": ("gpu-worker",),
    "resident": ("gpu-worker",),
    "packet": ("gpu-worker",),
    "emulate_link_gb_per_s": ("gpu-worker",),
    "emulate_device_memory": ("gpu-worker",),
    "timeline": ("gpu-worker",),
    "checksums": ("gpu-worker",),
    "shm_dir": ("cpu-worker", "gpu-worker"),
    "attention_processes": ("cpu-worker",),
    "prefill_chunk_tokens": ("gateway",),
    "max_waiting_requests": ("gateway",),
    "metrics_listen": ("gateway",),
    "batch_dir": ("gateway",),
    "otel": ("gateway",),
}


def _option(text: str) -> Any:
    return typer.Option(help=text, show_default=False, rich_help_panel="Services")


@dataclass(frozen=True)
class StackOptions:
    """How the services run; None leaves the choice to them."""

    kv: Annotated[str | None, _option("Size of the KV cache, such as 64GiB.")] = None
    dtype: Annotated[str | None, _option("bf16 or fp32; by default the checkpoint's.")] = None
    kv_dtype: Annotated[
        str | None, _option("int8 for a KV cache in 8 bits; by default as computed.")
    ] = None
    device: Annotated[str | None, _option("auto, cpu or cuda.")] = None
    threads: Annotated[int | None, _option("Threads of device cpu.")] = None
    max_sequences: Annotated[int | None, _option("Requests that run at once.")] = None
    max_step_tokens: Annotated[int | None, _option("Tokens of one step.")] = None
    hardware: Annotated[Path | None, _option("This machine's profile.")] = None
    schedule: Annotated[str | None, _option("auto, sequential or pipelined.")] = None
    resident: Annotated[str | None, _option("Device memory for layers that are not streamed.")] = (
        None
    )
    packet: Annotated[str | None, _option("Largest copy of weights at once.")] = None
    emulate_link_gb_per_s: Annotated[
        float | None, _option("Device cpu: stream the weights over a link of this rate.")
    ] = None
    emulate_device_memory: Annotated[str | None, _option("Memory of that device.")] = None
    timeline: Annotated[
        Path | None, _option("A file for a Chrome/Perfetto trace of the steps.")
    ] = None
    checksums: Annotated[
        bool | None, _option("Verify KV blocks and activations whenever they are read (slow).")
    ] = None
    shm_dir: Annotated[Path | None, _option("Where shared memory is made.")] = None
    attention_processes: Annotated[int | None, _option("By default one for each core.")] = None
    prefill_chunk_tokens: Annotated[
        int | None, _option("Prompt tokens of one request in one step.")
    ] = None
    max_waiting_requests: Annotated[int | None, _option("Length of the queue.")] = None
    metrics_listen: Annotated[str | None, _option("host:port for Prometheus; by default none.")] = (
        None
    )
    batch_dir: Annotated[Path | None, _option("Where submitted batches are kept.")] = None
    otel: Annotated[
        bool | None, _option("Spans of OpenTelemetry; the OTEL_ variables say whereto.")
    ] = None
    isa: Annotated[str | None, _option("Instruction set of the CPU kernels.")] = None

    def stack(self, model: Path, listen: str | None, show_logs: bool) -> StackConfig:
        """The services to start."""
        options: dict[str, list[str]] = {}
        for name, services in RECEIVERS.items():
            value = getattr(self, name)
            for service in services if value is not None else ():
                options.setdefault(service, []).append(_flag(name, value))
        return StackConfig(
            model=model,
            listen=listen,
            options={service: tuple(flags) for service, flags in options.items()},
            environment={"MOE_LENS_ISA": self.isa} if self.isa is not None else {},
            show_logs=show_logs,
        )


def _flag(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={value}"


def default_server() -> str:
    """Where `up` listens and `generate` asks unless told: a socket that only this user reaches.

    Raises StackError when the directory for it exists and is somebody else's.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime) / "moe-lens" if runtime else Path(f"/tmp/moe-lens-{os.getuid()}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if found.st_uid != os.getuid() or not private:
        raise StackError(f"{directory} is not a directory of this user alone; remove it")
    return f"unix:{directory}/gateway.sock"
