"""Memory that lies: with checksums a changed KV byte costs time, never a wrong token."""

import asyncio
import os
from pathlib import Path

from planner.spec import ModelSpec
from tests.servers import descendants
from tests.system.conftest import Setting, draw_prompts, greedy, kv_block_bytes, running

KV_BLOCKS = 512


def flip_kv_bytes(model: Path, others: set[int]) -> int:
    """Change one byte of every block in the first layer, in the memory that the attention
    processes started since `others` share; returns how many."""
    block_bytes = kv_block_bytes(model, "bf16") // ModelSpec.from_directory(model).n_layers
    for pid in set(descendants(os.getpid())) - others:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if ".kv" not in line or "s" not in rights:
                continue
            begin = int(span.split("-")[0], 16)
            with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
                for block in range(KV_BLOCKS):
                    memory.seek(begin + block * block_bytes + 3)
                    old = memory.read(1)
                    memory.seek(begin + block * block_bytes + 3)
                    memory.write(bytes([old[0] ^ 0x40]))
            return KV_BLOCKS
    return 0


def test_streams_go_on_with_their_own_tokens(demo_model: Path) -> None:
    prompts = draw_prompts(8, 100, 4096, seed=12)

    async def main() -> None:
        others = set(descendants(os.getpid()))  # a stack of the session's
        setting = Setting("bf16", kv_blocks=KV_BLOCKS, checksums=True)
        async with running(demo_model, setting) as (_, client):
            alone = await greedy(client, prompts, 200)
            assert (await client.load()).recoveries == 0
            again = asyncio.ensure_future(greedy(client, prompts, 200))
            while (await client.load()).kv_used_tokens < 1000:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert await asyncio.to_thread(flip_kv_bytes, demo_model, others) == KV_BLOCKS
            assert await again == alone
            assert (await client.load()).recoveries >= 1

    asyncio.run(main())
