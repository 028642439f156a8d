"""`moe-lens gpu-worker`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InvalidInputError
from planner.units import parse_bytes

app = typer.Typer(add_completion=False)


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"MOE_LENS_{name}"


def size(text: str) -> int:
    """Bytes from text such as "64 GiB"; a usage error where it is none."""
    try:
        return parse_bytes(text)
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from error


@app.command("gpu-worker")
def gpu_worker(
    listen: Annotated[
        str, typer.Option(help="unix:/path or host:port", envvar=variable("GPU_WORKER_LISTEN"))
    ],
    cpu_worker: Annotated[
        str, typer.Option(help="Address of the CPU worker.", envvar=variable("CPU_WORKER"))
    ],
    model: Annotated[
        Path, typer.Option(help="Hugging Face checkpoint directory.", envvar=variable("MODEL"))
    ],
    kv: Annotated[
        int | None,
        typer.Option(
            parser=size,
            help="Size of the KV cache, e.g. 64GiB; by default 40 % of what is free.",
            envvar=variable("KV"),
            metavar="SIZE",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16 or fp32; by default the checkpoint's.", envvar=variable("DTYPE")),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda.", envvar=variable("DEVICE"))
    ] = "auto",
    max_step_tokens: Annotated[
        int, typer.Option(help="Tokens of one step.", envvar=variable("MAX_STEP_TOKENS"))
    ] = 2048,
    max_sequences: Annotated[
        int, typer.Option(help="Sequences that run at once.", envvar=variable("MAX_SEQUENCES"))
    ] = 1024,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of device cpu; by default all cores.", envvar=variable("THREADS")
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            help="This machine's profile (moe-lens profile).", envvar=variable("HARDWARE")
        ),
    ] = None,
    shm_dir: Annotated[
        Path,
        typer.Option(help="Where the CPU worker keeps the KV cache.", envvar=variable("SHM_DIR")),
    ] = Path("/dev/shm"),
    peer_timeout_s: Annotated[
        float,
        typer.Option(
            help="Silence after which the CPU worker counts as hung.",
            envvar=variable("PEER_TIMEOUT_S"),
        ),
    ] = 5.0,
) -> None:
    """Execute the steps of one model; the gateway is its only client."""
    from gpu_worker.config import WorkerConfig
    from gpu_worker.errors import CheckpointError, ConfigurationError, MemoryShortage
    from gpu_worker.worker import CpuWorkerRefused, main
    from protos.serving import ServingConfig, run

    try:
        config = WorkerConfig(
            serving=ServingConfig("gpu-worker", listen),
            cpu_worker=cpu_worker,
            model=model,
            kv_bytes=kv,
            dtype=dtype,
            device=device,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            threads=threads,
            hardware=hardware,
            shm_dir=shm_dir,
            peer_timeout_s=peer_timeout_s,
        )
        status = run(main(config))
    except (
        CheckpointError,
        ConfigurationError,
        CpuWorkerRefused,
        InvalidInputError,
        MemoryShortage,
        OSError,
        ValueError,
    ) as error:
        print(f"moe-lens gpu-worker: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(status)
