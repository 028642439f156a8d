"""Whole systems: the four services as processes, asked as clients ask them."""

import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from moelens.client import AsyncClient

from gateway.launcher import Stack, StackConfig
from tests.servers import descendants
from tests.system.models import TINY, save_tiny

torch.set_num_threads(2)


@dataclass(frozen=True)
class Setting:
    """How a system runs."""

    dtype: str
    processes: int = 2
    isa: str | None = None
    kv_blocks: int = 2048
    chunk_tokens: int | None = None
    step_tokens: int | None = None
    checksums: bool = False
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def config(self, model: Path, shm_dir: Path) -> StackConfig:
        block_bytes = kv_block_bytes(model, self.dtype)
        worker = ["--dtype", self.dtype, "--kv", str(self.kv_blocks * block_bytes)]
        if self.checksums:
            worker.append("--checksums")
        shm = ("--shm-dir", str(shm_dir))
        gateway: list[str] = []
        if self.chunk_tokens is not None:
            gateway += ["--prefill-chunk-tokens", str(self.chunk_tokens)]
        if self.step_tokens is not None:
            gateway += ["--max-step-tokens", str(self.step_tokens)]
        return StackConfig(
            model=model,
            options={
                "gpu-worker": (*worker, *shm, *self.more.get("gpu-worker", ())),
                "cpu-worker": ("--attention-processes", str(self.processes), *shm),
                "gateway": (*gateway, *self.more.get("gateway", ())),
            },
            environment={} if self.isa is None else {"MOE_LENS_ISA": self.isa},
            show_logs=False,
        )


def kv_block_bytes(model: Path, dtype: str) -> int:
    """Bytes of a block of 16 tokens over all layers, keys and values."""
    from planner.spec import ModelSpec

    return int(ModelSpec.from_directory(model).with_formats(kv=dtype).kv_bytes_per_token) * 16


def draw_prompts(count: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; the extremes are among them."""
    draw = random.Random(seed)
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


@contextlib.asynccontextmanager
async def running(model: Path, setting: Setting) -> AsyncIterator[tuple[Stack, AsyncClient]]:
    """A system and a client of it; afterwards nothing may be left of either."""
    before = set(descendants(os.getpid()))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        shm_dir = Path(directory)
        config = setting.config(model, shm_dir)
        async with Stack(config) as stack, AsyncClient(stack.address) as client:
            yield stack, client
            await check_idle(client)
        assert stack.exit_statuses == dict.fromkeys(stack.exit_statuses, 0)
        assert set(descendants(os.getpid())) == before
        assert os.listdir(shm_dir) == []  # noqa: PTH208


async def check_idle(client: AsyncClient) -> None:
    """No request, no KV block in use."""
    for _ in range(100):
        load = await client.load()
        if (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still busy: {load}")


async def greedy(
    client: AsyncClient, prompts: Sequence[list[int]], max_tokens: int
) -> list[list[int]]:
    """All prompts at once."""
    answers = await asyncio.gather(
        *(
            client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            for prompt in prompts
        )
    )
    return [completions[0].token_ids for completions in answers]


async def leave_early(client: AsyncClient, prompt: list[int], after_tokens: int) -> None:
    """A client that goes away in the middle of its stream."""
    seen = 0
    stream = client.stream(prompt, max_tokens=200, temperature=0.0, ignore_eos=True)
    async with contextlib.aclosing(stream):
        async for event in stream:
            seen += len(event.token_ids)
            if seen >= after_tokens:
                return


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start without measuring the machine: nobody here looks at predictions."""
    monkeypatch.setenv("MOE_LENS_MEASURE", "false")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(name, dtype) → checkpoint."""
    return {
        (name, dtype): save_tiny(tmp_path_factory.mktemp(f"{name}-{dtype}"), name, dtype)
        for name in TINY
        for dtype in ("fp32", "bf16")
    }


@pytest.fixture(scope="session")
def supported_isas() -> tuple[str, ...]:
    """Instruction sets that the kernels can use here."""
    from native._attention import lib

    from native import isa

    return isa.supported(lib)
