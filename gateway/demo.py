"""`moe-lens demo`: the shipped model served, some text streamed, prediction against measurement."""

import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.stack_options import StackOptions
from protos.options import with_options

if TYPE_CHECKING:
    from moelens.client import AsyncClient

    from gateway.admission import Plan
    from gateway.launcher import Stack

app = typer.Typer(add_completion=False)

SHIPPED = Path(__file__).resolve().parent.parent / "demo" / "model"
PROMPTS = (
    "First Citizen:\nBefore we proceed any further,",
    "ROMEO:\nBut soft, what light",
    "KING RICHARD III:\nA horse!",
    "JULIET:\nO Romeo, Romeo!",
)
MAX_TOKENS = 64
TEMPERATURE, SEED = 0.7, 7
PROFILE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Load:
    """The measured part: `requests` at once, of uniform length so that a formula can speak."""

    requests: int = 96
    prompt_tokens: int = 64
    generated_tokens: int = 64

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens of all requests."""
        return self.requests * (self.prompt_tokens + self.generated_tokens)


@app.command("demo")
@with_options(StackOptions)
def demo(
    stack: StackOptions,
    model: Annotated[
        Path, typer.Option(help="The checkpoint's directory.", envvar="MOE_LENS_MODEL")
    ] = SHIPPED,
) -> None:
    """Measure this machine, serve the model, stream some text, compare with the prediction."""
    from gateway.commands import run_command

    run_command("demo", _demo(stack, model))


async def _demo(options: StackOptions, model: Path) -> int:
    from moelens.client import AsyncClient

    from gateway.launcher import Stack, check_model

    check_model(model)
    with tempfile.TemporaryDirectory(prefix="moe-lens-") as directory:
        profile = options.hardware or await _profiled(model, Path(directory) / "machine.json")
        options = replace(options, hardware=profile, kv=options.kv or "256MiB")
        begin = time.monotonic()
        _say("starting the planner, the CPU worker, the GPU worker and the gateway …")
        async with Stack(options.stack(model, None, show_logs=False)) as stack:
            _say(f"ready after {time.monotonic() - begin:.1f} s")
            async with AsyncClient(stack.address) as client:
                await _describe(client)
                await _stream(client)
                await _compare(stack, client, Load())
            _say("stopping …")
    _say("stopped; no process and no shared memory left")
    return 0


def _say(text: str) -> None:
    print(f"-- {text}", flush=True)


async def _profiled(model: Path, out: Path) -> Path:
    """What this machine can do, measured with this model in a process of its own."""
    _say("measuring this machine …")
    command = [sys.executable, "-m", "gateway.cli", "profile", "--model", str(model)]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=PROFILE_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise OSError(f"moe-lens profile failed:\n{done.stderr[-2000:]}")
    print(done.stdout)
    return out


async def _describe(client: "AsyncClient") -> None:
    model = await client.model()
    _say(
        f"{model.model}: {model.total_parameters / 1e6:.1f} M parameters, "
        f"{model.active_parameters / 1e6:.1f} M active, {model.dtype} on {model.device}, "
        f"KV cache for {model.kv_capacity_tokens} tokens"
    )


async def _stream(client: "AsyncClient") -> None:
    """All prompts at once; each is printed as it comes, in order."""
    from gateway.generate import Result, print_text

    results = [Result(prompt) for prompt in PROMPTS]
    options = {"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE, "seed": SEED}
    tasks = [asyncio.create_task(result.run(client, options)) for result in results]
    for number, result in enumerate(results, 1):
        _say(f"completion {number} of {len(results)}")
        sys.stdout.write(result.prompt)
        await print_text(result, several=False)
    await asyncio.gather(*tasks)
    if any(result.error for result in results):
        raise OSError("a completion failed")


async def _compare(stack: "Stack", client: "AsyncClient", load: Load) -> None:
    """Throughput of a load: what the planner says beforehand, and what it is."""
    plan = await _predicted(stack, load)
    measured_s = await _measured_s(client, load)
    rate = load.tokens / measured_s
    _say(
        f"{load.requests} requests of {load.prompt_tokens} prompt and {load.generated_tokens} "
        "generated tokens, all at once:"
    )
    if plan is None or plan.tokens_per_s is None:
        print("   predicted   the planner has no figure for this machine")
    else:
        print(f"   predicted   {plan.tokens_per_s:8.0f} tokens/s, limited by {plan.limit}")
    print(f"   measured    {rate:8.0f} tokens/s in {measured_s:.2f} s")
    if plan is not None and plan.tokens_per_s:
        print(f"   measured / predicted   {rate / plan.tokens_per_s:.2f}", flush=True)


async def _predicted(stack: "Stack", load: Load) -> "Plan | None":
    from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub
    from moelens.v1.planner_pb2_grpc import PlannerStub

    from gateway.forecast import Workload, ask
    from gateway.worker import wait_for_worker
    from planner.spec import ModelSpec
    from protos.transport import channel

    async with channel(stack.planner) as planner, channel(stack.gpu_worker) as worker:
        info = await wait_for_worker(GpuWorkerStub(worker))
        spec = ModelSpec.from_directory(stack.config.model)
        workload = Workload(load.prompt_tokens, load.generated_tokens, load.requests)
        return await ask(PlannerStub(planner), info, spec, workload)


async def _measured_s(client: "AsyncClient", load: Load) -> float:
    """Seconds for all of it."""
    ids = await client.tokenize("\n\n".join(PROMPTS) * load.prompt_tokens)
    prompts = [ids[i : i + load.prompt_tokens] for i in range(load.requests)]
    begin = time.monotonic()
    await asyncio.gather(
        *(
            client.generate(
                prompt, max_tokens=load.generated_tokens, temperature=0.0, ignore_eos=True
            )
            for prompt in prompts
        )
    )
    return time.monotonic() - begin
