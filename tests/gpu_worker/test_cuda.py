"""The same engine on a CUDA device: streamed weights, pinned slots, flash attention in chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import residency, weights
from gpu_worker.checkpoint import Checkpoint
from gpu_worker.device import CudaDevice
from gpu_worker.families import family_of
from gpu_worker.mover import Mover
from gpu_worker.ops import TorchOps
from gpu_worker.own_attention import causal_by_chunk

pytestmark = pytest.mark.cuda


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(TorchOps(torch.bfloat16, torch.device("cuda")))


def test_streamed_stages_arrive_as_they_are_in_the_store(
    checkpoint_bf16: Path, device: CudaDevice
) -> None:
    checkpoint = Checkpoint(checkpoint_bf16)
    family = family_of(checkpoint.config)
    config = family.decoder_config(checkpoint.config)
    store = weights.load(checkpoint, family, config, device.ops, weights.LoadProgress())
    device.register(store.memory.data_ptr(), store.n_bytes)
    sizes = [block.n_bytes for block in store.stages]
    with Mover(store, device, residency.choose(sizes, sizes[0]), packet_bytes=10_000) as mover:
        for _ in range(3):
            mover.begin_pass()
            for stage in range(config.n_layers):
                found = mover.acquire(stage).linear("gate_up").weight.cpu()
                host = weights.BlockWeights(
                    store.stages[stage], store.stage_bytes(stage), device.ops
                )
                assert torch.equal(found, host.linear("gate_up").weight)
                mover.release(stage)


def test_a_small_copy_does_not_wait_for_all_packets(device: CudaDevice) -> None:
    assert device.link is not None
    source = torch.randn(64, 1024).pin_memory()
    target = torch.empty(64, 1024, device="cuda")
    device.link.upload(target, source)
    back = torch.empty(64, 1024).pin_memory()
    device.link.download(back, target)
    assert torch.equal(back, source)


@pytest.mark.parametrize("counts", [[1], [300], [5, 1, 270, 64]])
def test_flash_attention_in_chunks_agrees_with_the_plain_one(counts: list[int]) -> None:
    torch.manual_seed(0)
    n = sum(counts)
    q, k, v = (torch.randn(n, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    out, lse = causal_by_chunk(q.cuda(), k.cuda(), v.cuda(), counts, 0.125)
    expected, expected_lse = causal_by_chunk(q.float(), k.float(), v.float(), counts, 0.125)
    error = torch.linalg.norm(out.cpu().float() - expected) / torch.linalg.norm(expected)
    assert error < 1e-2
    assert torch.allclose(lse.cpu(), expected_lse, atol=2e-2)


@pytest.mark.parametrize("resident_bytes", [0, 10**9])
def test_tokens_agree_with_device_cpu(
    resident_bytes: int, checkpoint_fp32: Path, make_rig: Any, make_driver: Any
) -> None:
    prompts = {0: [5, 6, 7], 1: list(range(40)), 2: [9] * 100}
    expected = make_driver(make_rig(checkpoint_fp32))
    expected.generate(prompts, 8)
    rig = make_rig(
        checkpoint_fp32,
        device_of=lambda dtype: CudaDevice(TorchOps(dtype, torch.device("cuda"))),
        resident_bytes=resident_bytes,
        pipelined=True,
        chunks_on_device=True,
    )
    driver = make_driver(rig, chunk_tokens=33)
    driver.generate(prompts, 8)
    assert driver.tokens == expected.tokens
