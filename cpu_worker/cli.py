"""`moe-lens cpu-worker`: serve the CPU worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command("cpu-worker")
def cpu_worker(
    listen: Annotated[
        str, typer.Option(help="unix:/path or host:port", envvar="MOE_LENS_CPU_WORKER_LISTEN")
    ],
    shm_dir: Annotated[
        Path,
        typer.Option(help="Where shared memory is made (a tmpfs).", envvar="MOE_LENS_SHM_DIR"),
    ] = Path("/dev/shm"),
    attention_processes: Annotated[
        int | None,
        typer.Option(
            help="How many; by default one for each core.",
            envvar="MOE_LENS_ATTENTION_PROCESSES",
        ),
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(
            help="Instruction set of the kernels; by default the best.", envvar="MOE_LENS_ISA"
        ),
    ] = None,
    pin: Annotated[
        bool, typer.Option(help="Pin each attention process to a core.", envvar="MOE_LENS_PIN")
    ] = True,
    huge_pages: Annotated[
        bool,
        typer.Option(help="Use huge pages where the kernel allows.", envvar="MOE_LENS_HUGE_PAGES"),
    ] = True,
    spin_us: Annotated[
        float | None,
        typer.Option(
            help="How long an idle process spins before it sleeps.", envvar="MOE_LENS_SPIN_US"
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="For the GPU worker to leave after the first signal.")
    ] = 10.0,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file; clients must show a certificate then.")
    ] = None,
) -> None:
    """Hold the KV cache in shared memory and compute attention over it."""
    if isa is not None:
        # Read when the kernels are loaded, here and in the attention processes.
        os.environ["MOE_LENS_ISA"] = isa
    try:
        status = _serve(
            listen,
            {
                "shm_dir": shm_dir,
                "attention_processes": attention_processes,
                "pin": pin,
                "huge_pages": huge_pages,
                "spin_s": None if spin_us is None else spin_us / 1e6,
            },
            grace_s,
            (tls_certificate, tls_key, tls_client_ca),
        )
    except ValueError as error:
        print(f"moe-lens cpu-worker: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def _serve(
    listen: str,
    settings: dict[str, object],
    grace_s: float,
    tls_files: tuple[Path | None, Path | None, Path | None],
) -> int:
    """Raises ValueError where a setting is wrong."""
    # Loaded here: the kernels must see MOE_LENS_ISA, and `--help` must not wait for gRPC.
    from cpu_worker.config import CpuWorkerConfig
    from cpu_worker.service import CpuWorkerService
    from protos.serving import ServerTls, ServingConfig, run, serve

    certificate, key, client_ca = tls_files
    tls = None
    if certificate is not None and key is not None:
        tls = ServerTls(certificate, key, client_ca)
    elif any(tls_files):
        raise ValueError("--tls-certificate and --tls-key must be given together")
    config = CpuWorkerConfig(**settings)  # type: ignore[arg-type]
    serving = ServingConfig("cpu_worker", listen, tls=tls, grace_s=grace_s)

    async def main() -> int:
        service = CpuWorkerService(config)
        try:
            return await serve(
                [service], serving, background=service.background, drain=service.drain
            )
        finally:
            await service.close()

    return run(main())


def main() -> None:
    """Entry point of `python -m cpu_worker.cli`."""
    app()


if __name__ == "__main__":
    main()
