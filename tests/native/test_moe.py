"""The mixture-of-experts block against transformers' Mixtral."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from native import gemm, moe
from native.errors import InvalidArgumentError
from native.threads import ThreadPool
from tests.native.gemm_support import (
    TORCH_DTYPES,
    packed,
    packed_pair,
    poisoned,
    random,
    relative_error,
    using_isa,
)

HIDDEN, INNER, N_EXPERTS, TOP_K = 128, 176, 8, 2
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def reference_block(dtype: str) -> MixtralSparseMoeBlock:
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=N_EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.normal_(0, 0.08, generator=generator)
    return block.to(TORCH_DTYPES[dtype])


def packed_block(block: MixtralSparseMoeBlock, dtype: str) -> moe.MoeWeights:
    pairs, down = block.experts.gate_up_proj.data, block.experts.down_proj.data
    return moe.MoeWeights(
        router=packed(block.gate.weight.data, dtype),
        gate_up=gemm.WeightGroup(
            [packed_pair(pair[:INNER], pair[INNER:], dtype) for pair in pairs]
        ),
        down=gemm.WeightGroup([packed(weight, dtype) for weight in down]),
        top_k=TOP_K,
    )


def routed_alike(block: MixtralSparseMoeBlock, x: torch.Tensor) -> torch.Tensor:
    """Rows whose second and third router logits differ by more than rounding."""
    best = torch.nn.functional.linear(x.double(), block.gate.weight.double()).topk(3).values
    return (best[:, 1] - best[:, 2]) > 0.02


@pytest.mark.parametrize("isa_name", gemm.supported_isas())
@each_dtype
def test_block_is_transformers(isa_name: str, dtype: str) -> None:
    block, x, residual = (
        reference_block(dtype),
        random(133, HIDDEN, dtype),
        random(133, HIDDEN, dtype),
    )
    out, counts = residual.clone(), torch.zeros(N_EXPERTS, dtype=torch.int64)
    with using_isa(isa_name):
        moe.moe(
            x,
            packed_block(block, dtype),
            out,
            workspace=moe.Workspace(),
            residual=out,
            expert_tokens=counts,
        )
    alike = routed_alike(block, x)
    expected = residual + block(x[None])[0]
    assert alike.float().mean() > 0.9
    assert relative_error(out[alike], expected[alike]) < (2e-3 if dtype == "bf16" else 1e-6)
    assert counts.sum() == 133 * TOP_K


@each_dtype
def test_a_token_is_the_same_bits_alone_in_a_crowd_and_on_more_threads(dtype: str) -> None:
    weights, x = packed_block(reference_block(dtype), dtype), random(5000, HIDDEN, dtype)
    crowd = poisoned(5000, HIDDEN, dtype)  # more than one pass of 4096
    with ThreadPool(1) as pool:
        moe.moe(x, weights, crowd, workspace=moe.Workspace(), pool=pool)
    workspace = moe.Workspace()
    with ThreadPool(3) as pool:
        for first, n in [(0, 1), (17, 2), (4090, 13), (4999, 1), (100, 500)]:
            out = poisoned(n, HIDDEN, dtype)
            moe.moe(x[first : first + n], weights, out, workspace=workspace, pool=pool)
            assert torch.equal(out, crowd[first : first + n])


def test_workspace_is_what_was_announced_and_bounded() -> None:
    weights, workspace = packed_block(reference_block("bf16"), "bf16"), moe.Workspace()
    x = random(100, HIDDEN, "bf16")
    moe.moe(x, weights, x.clone(), workspace=workspace)
    assert workspace.size_bytes == moe.workspace_bytes(weights, 100)
    assert moe.workspace_bytes(weights, 4096) == moe.workspace_bytes(weights, 100_000)


def test_times_of_the_parts_are_reported() -> None:
    weights, x = packed_block(reference_block("bf16"), "bf16"), random(300, HIDDEN, "bf16")
    times = moe.moe(x, weights, x.clone(), workspace=moe.Workspace())
    assert min(times.route_s, times.gate_up_s, times.down_s, times.combine_s) > 0


def test_wrong_arguments_are_named() -> None:
    block = reference_block("bf16")
    weights, x = packed_block(block, "bf16"), random(3, HIDDEN, "bf16")
    with pytest.raises(InvalidArgumentError, match="x: is fp32, must be bf16"):
        moe.moe(x.float(), weights, x, workspace=moe.Workspace())
    with pytest.raises(InvalidArgumentError, match="top_k: 9 is not between 1 and 8"):
        moe.MoeWeights(weights.router, weights.gate_up, weights.down, top_k=9)
    with pytest.raises(InvalidArgumentError, match=r"down: must be 8 packed weights \(128, 176\)"):
        moe.MoeWeights(weights.router, weights.gate_up, weights.gate_up, top_k=2)
    with pytest.raises(InvalidArgumentError, match="gate_up: is bf16, the router is fp32"):
        router = packed(block.gate.weight.data, "fp32")
        moe.MoeWeights(router, weights.gate_up, weights.down, top_k=2)
