"""`moe-lens profile`: measure this machine for the planner, through the parts that serve."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.stack_options import StackOptions
from protos.options import with_options

app = typer.Typer(add_completion=False)


@app.command("profile")
@with_options(StackOptions)
def profile(
    stack: StackOptions,
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
    overheads: Annotated[
        bool,
        typer.Option(help="Also what the services cost a step; without --cpu-worker only."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's contents.")] = False,
) -> None:
    """Measure link, device, host memory, CPU attention and the services' own cost with a model;
    write a hardware file."""
    from gateway.commands import run_command

    run_command("profile", _profile(stack, model, out, cpu_worker, overheads, as_json))


async def _profile(
    stack: StackOptions,
    model: Path,
    out: Path,
    cpu_worker: str | None,
    overheads: bool,
    as_json: bool,
) -> int:
    from gateway.bench.overheads import measure_overheads
    from planner.hardware import HardwareSpec

    config = stack.stack(model, None, show_logs=False)
    flags = [*config.options.get("gpu-worker", ()), f"--model={model}", f"--out={out}"]
    if cpu_worker is not None:
        flags.append(f"--cpu-worker={cpu_worker}")
    if stack.attention_processes is not None:
        flags.append(f"--attention-processes={stack.attention_processes}")
    # A process of its own: what it holds is gone when the services start.
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "gpu_worker.profile_cli", *flags],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode
    table = done.stdout
    if overheads and cpu_worker is None:
        found = await measure_overheads(config.with_flags("gpu-worker", [f"--hardware={out}"]))
        source = "wall time of steps through the gateway beyond the prediction"
        HardwareSpec.load(out).with_values("measured", source, **found).save(out)
        table += "".join(f"{name:28} {value:12.4g}  {source}\n" for name, value in found.items())
    hardware = HardwareSpec.load(out)
    print(json.dumps(hardware.to_json(), indent=2) if as_json else table.rstrip())
    return 0


if __name__ == "__main__":
    app()
