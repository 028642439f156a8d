"""`moe-lens bench`: throughput of a model on this machine, predicted and measured."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.stack_options import StackOptions
from protos.options import with_options

if TYPE_CHECKING:
    from planner.workload import Workload

app = typer.Typer(add_completion=False)


@app.command("bench")
@with_options(StackOptions)
def bench(
    stack: StackOptions,
    model: Annotated[
        Path, typer.Option(help="The checkpoint's directory.", envvar="MOE_LENS_MODEL")
    ],
    requests: Annotated[int | None, typer.Option(min=1, help="How many (K).")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt (p).")] = None,
    generate: Annotated[int | None, typer.Option(min=1, help="Tokens to generate (g).")] = None,
    workload: Annotated[
        str | None, typer.Option(help="A workload of the planner's catalogue instead of lengths.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSONL of prompt and generated tokens instead of lengths.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts' token ids.")] = 0,
    iterations: Annotated[bool, typer.Option(help="With --json: every iteration.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of a table.")] = False,
) -> None:
    """Send requests all at once, compare with what was predicted before the first of them."""
    from gateway.bench.run import BenchConfig, run_bench
    from gateway.commands import run_command

    async def run() -> int:
        work = _workload(requests, prompt, generate, workload, trace)
        lengths = tuple(work.lengths())
        config = BenchConfig(
            stack.stack(model, None, show_logs=False), lengths, seed, stack.timeline
        )
        report = await run_bench(config)
        print(json.dumps(report.to_json(iterations), indent=2) if as_json else report.text())
        return 0

    run_command("bench", run())


def _workload(
    requests: int | None,
    prompt: int | None,
    generate: int | None,
    workload: str | None,
    trace: Path | None,
) -> "Workload":
    """Raises ValueError where the options do not say one thing."""
    from planner.workload import Workload, named

    given = [name for name, value in (("workload", workload), ("trace", trace)) if value]
    if prompt is not None or generate is not None:
        given.append("prompt and generate")
    if len(given) != 1:
        raise ValueError("give --prompt and --generate, or --workload, or --trace")
    if workload is not None:
        work = named(workload)
    elif trace is not None:
        work = Workload.from_trace(trace)
    elif prompt is None or generate is None or requests is None:
        raise ValueError("--prompt, --generate and --requests go together")
    else:
        return Workload.uniform(prompt, generate, requests)
    return work if requests is None else work.with_requests(requests)
