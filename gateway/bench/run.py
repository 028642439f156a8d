"""One benchmark run: start the services, predict, send every request at once, compare."""

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moelens.client import AsyncClient, RequestFailed, request
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerStub

from gateway.bench.report import Measured, Report
from gateway.bench.timeline import add_scheduler
from gateway.launcher import Stack, StackConfig
from gateway.pacing import EngineConfig
from gateway.prediction import predict
from gateway.worker import WorkerInfo, wait_for_worker
from planner.simulate import Request, SimulationResult
from planner.spec import ModelSpec
from planner.workload import Lengths
from protos.transport import channel

WARM_UP = Lengths(16, 4)
# A queue longer than the work, so that nothing is refused.
SPARE_WAITING = 64


@dataclass(frozen=True)
class BenchConfig:
    """What to run. `lengths` are in the order of arrival."""

    stack: StackConfig
    lengths: tuple[Lengths, ...]
    seed: int = 0
    timeline: Path | None = None  # that the stack is told to write


async def run_bench(config: BenchConfig) -> Report:
    """Raises StackError when the services cannot run, RequestFailed when a request fails."""
    with tempfile.TemporaryDirectory(prefix="moe-lens-bench-") as directory:
        log = Path(directory) / "steps.jsonl"
        waiting = len(config.lengths) + SPARE_WAITING
        flags = [f"--step-log={log}", f"--max-waiting-requests={waiting}"]
        async with Stack(config.stack.with_flags("gateway", flags)) as stack:
            predicted = await _predicted(config, stack)
            warm_up_steps = await _warm_up(stack, log, config.seed)
            measured = await send_all(stack.address, config.lengths, config.seed)
        steps = read_steps(log)
        measured.steps = steps[warm_up_steps:]
        if config.timeline is not None:
            add_scheduler(config.timeline, steps)
    return Report(predicted, measured)


async def _predicted(config: BenchConfig, stack: Stack) -> SimulationResult:
    info = await worker_info(stack)
    model = ModelSpec.from_directory(config.stack.model)
    requests = [Request(prompt, generated) for prompt, generated in config.lengths]
    return await asyncio.to_thread(predict, info, model, EngineConfig(), requests)


async def worker_info(stack: Stack) -> WorkerInfo:
    """What the stack's GPU worker says of itself."""
    async with channel(stack.worker_address) as worker:
        return await wait_for_worker(GpuWorkerStub(worker))


async def _warm_up(stack: Stack, log: Path, seed: int) -> int:
    """Everything runs once before the clock does; returns the steps that the log has by then."""
    async with AsyncClient(stack.address) as client:
        vocab_size = (await client.model()).vocab_size
        source = random.Random(seed)
        await asyncio.gather(
            *(_send(client, WARM_UP, vocab_size, random.Random(source.random())) for _ in range(8))
        )
    await asyncio.sleep(0.2)
    return len(read_steps(log))


async def send_all(address: str, all_lengths: Sequence[Lengths], seed: int = 0) -> Measured:
    """Send requests of random ids to a gateway all at once; what its client sees.

    RequestFailed when a request fails.
    """
    async with AsyncClient(address) as client:
        vocab_size = (await client.model()).vocab_size
        sources = [random.Random(f"{seed}-{i}") for i in range(len(all_lengths))]
        start = time.monotonic()
        await asyncio.gather(
            *(
                _send(client, lengths, vocab_size, source)
                for lengths, source in zip(all_lengths, sources, strict=True)
            )
        )
        total_s = time.monotonic() - start
    prompt_tokens = sum(lengths.prompt_tokens for lengths in all_lengths)
    generated_tokens = sum(lengths.generated_tokens for lengths in all_lengths)
    return Measured(total_s, prompt_tokens, generated_tokens)


async def _send(
    client: AsyncClient, lengths: Lengths, vocab_size: int, source: random.Random
) -> None:
    """One request of random ids that generates to the end."""
    prompt = [source.randrange(vocab_size) for _ in range(lengths.prompt_tokens)]
    message = request(
        prompt, max_tokens=lengths.generated_tokens, temperature=0.0, ignore_eos=True, batch=True
    )
    tokens = 0
    async for event in client.responses(message):
        tokens += len(event.tokens.token_ids)
    if tokens != lengths.generated_tokens:
        raise ValueError(f"{tokens} tokens came, expected {lengths.generated_tokens}")


def read_steps(log: Path) -> Sequence[dict[str, float]]:
    """The records of a gateway's step log, as far as it is written."""
    with contextlib.suppress(FileNotFoundError), log.open() as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
    return []


__all__ = ["BenchConfig", "RequestFailed", "run_bench", "send_all"]
