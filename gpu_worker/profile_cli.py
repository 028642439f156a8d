"""`moe-lens profile`: measure this machine for the planner."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpu_worker.cli import say_what_is_wrong
from gpu_worker.options import ComputeOptions
from protos.options import with_options

if TYPE_CHECKING:
    from gpu_worker.config import WorkerConfig
    from gpu_worker.measuring import Measured
    from planner.hardware import HardwareSpec

app = typer.Typer(add_completion=False)


@app.command("profile")
@with_options(ComputeOptions)
def profile(
    compute: ComputeOptions,
    model: Annotated[
        Path, typer.Option(help="Hugging Face checkpoint directory.", envvar="MOE_LENS_MODEL")
    ],
    out: Annotated[Path, typer.Option(help="The file to write; --hardware reads it.")],
    cpu_worker: Annotated[
        str | None,
        typer.Option(
            help="Address of a CPU worker that nobody uses; by default one is started.",
            envvar="MOE_LENS_CPU_WORKER",
        ),
    ] = None,
    attention_processes: Annotated[
        int | None,
        typer.Option(help="Of the CPU worker that is started; by default one for each core."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's contents.")] = False,
) -> None:
    """Measure link, device, host memory and CPU attention with a model; write a hardware file."""

    def measure() -> int:
        from gpu_worker.config import WorkerConfig
        from protos.logs import set_up_logs
        from protos.serving import ServingConfig

        set_up_logs("profile")
        with contextlib.ExitStack() as stack:
            address = cpu_worker or stack.enter_context(
                started_cpu_worker(compute.shm_dir, attention_processes)
            )
            serving = ServingConfig("profile", "unix:/nowhere")
            # Checksums would be measured, and refuse KV that nobody stored.
            settings = {**compute.settings(), "checksums": False}
            config = WorkerConfig(serving, address, model, **settings)
            hardware, found = asyncio.run(_measure(config))
        hardware.save(out)
        print(json.dumps(hardware.to_json(), indent=2) if as_json else table(found))
        return 0

    raise typer.Exit(say_what_is_wrong("moe-lens profile", measure))


@contextlib.contextmanager
def started_cpu_worker(shm_dir: Path, attention_processes: int | None) -> Iterator[str]:
    """The address of a CPU worker that lives as long as the context."""
    with tempfile.TemporaryDirectory(prefix="moe-lens-") as directory:
        address = f"unix:{directory}/cpu-worker.sock"
        command = [sys.executable, "-m", "cpu_worker.cli", "--listen", address]
        command += ["--shm-dir", str(shm_dir)]
        if attention_processes is not None:
            command += ["--attention-processes", str(attention_processes)]
        with Path(directory, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                yield address
            finally:
                process.terminate()
                process.wait()


async def _measure(config: "WorkerConfig") -> tuple["HardwareSpec", list["Measured"]]:
    from moelens.v1.cpu_worker_pb2_grpc import CpuWorkerStub

    from gpu_worker import profile as profiling
    from gpu_worker import runtime
    from gpu_worker.cpu_link import configure
    from gpu_worker.weights import LoadProgress
    from native.channel import DevicePort
    from protos.transport import peer

    model = await asyncio.to_thread(runtime.load, config, LoadProgress())
    try:
        async with peer(config.cpu_worker, config.peer_tls) as connection:
            answer = await configure(model, CpuWorkerStub(connection))
            with DevicePort(answer.segment_path, peer_timeout_s=config.peer_timeout_s) as port:
                return await asyncio.to_thread(profiling.profile, model, port)
    finally:
        model.close()


def table(found: "list[Measured]") -> str:
    """One line for each value, in the unit that its name ends in."""
    return "\n".join(
        f"{name:28} {value:12.4g}  {measured.source}"
        for measured in found
        for name, value in measured.values.items()
    )


if __name__ == "__main__":
    app()
