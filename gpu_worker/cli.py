"""`moe-lens gpu-worker`: serve the GPU worker."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gpu_worker.options import ComputeOptions
from protos.options import PeerSecurity, ServingSecurity, with_options

app = typer.Typer(add_completion=False)


@app.command("gpu-worker")
@with_options(ServingSecurity, PeerSecurity, ComputeOptions)
def gpu_worker(
    security: ServingSecurity,
    peers: PeerSecurity,
    compute: ComputeOptions,
    listen: Annotated[
        str, typer.Option(help="unix:/path or host:port", envvar="MOE_LENS_GPU_WORKER_LISTEN")
    ],
    cpu_worker: Annotated[
        str, typer.Option(help="Address of the CPU worker.", envvar="MOE_LENS_CPU_WORKER")
    ],
    model: Annotated[
        Path, typer.Option(help="Hugging Face checkpoint directory.", envvar="MOE_LENS_MODEL")
    ],
    hardware: Annotated[
        Path | None,
        typer.Option(help="This machine's profile (moe-lens profile).", envvar="MOE_LENS_HARDWARE"),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="Without a profile, measure the machine for a second at the start.",
            envvar="MOE_LENS_MEASURE",
        ),
    ] = True,
    grace_s: Annotated[
        float, typer.Option(help="For the running step after the first signal.")
    ] = 10.0,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of all steps here at the end.")
    ] = None,
) -> None:
    """Execute the steps of one model; the gateway is its only client."""

    def serve() -> int:
        from gpu_worker.config import WorkerConfig
        from gpu_worker.worker import main
        from protos.serving import run

        config = WorkerConfig(
            serving=security.config("gpu-worker", listen, grace_s),
            cpu_worker=cpu_worker,
            peer_tls=peers.tls(),
            model=model,
            hardware=hardware,
            measure=measure,
            timeline=timeline,
            **compute.settings(),
        )
        return run(main(config))

    raise typer.Exit(say_what_is_wrong("moe-lens gpu-worker", serve))


def say_what_is_wrong(program: str, work: Callable[[], int]) -> int:
    """The exit status of `work`; what a user can put right is one message, and 2."""
    from gpu_worker.errors import (
        CheckpointError,
        CpuWorkerRefused,
        LoadingStopped,
        MemoryShortage,
    )

    try:
        return work()
    except LoadingStopped:
        return 0
    except (CheckpointError, CpuWorkerRefused, MemoryShortage, OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    app()
