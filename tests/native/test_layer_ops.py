"""Layer operations against transformers' Mixtral; the same bits on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers.models.mixtral import modeling_mixtral

from native import gemm, layer_ops
from native.errors import InvalidArgumentError
from tests.native.gemm_support import TORCH_DTYPES, poisoned, random, relative_error, using_isa

DTYPES = ("fp32", "bf16")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_every_isa(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `run`, asserted to be the same bits under each instruction set."""
    results = []
    for name in gemm.supported_isas():
        with using_isa(name):
            results.append(run())
    for name, result in zip(gemm.supported_isas(), results, strict=True):
        assert torch.equal(result, results[0]), name
    return results[0]


@each_dtype
@pytest.mark.parametrize("n", [1, 16, 50, 1024])
def test_rms_norm_is_transformers(dtype: str, n: int) -> None:
    x = random(201, n, dtype) * 3
    reference = modeling_mixtral.MixtralRMSNorm(n, 1e-5).to(TORCH_DTYPES[dtype])
    reference.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        out = poisoned(201, n, dtype)
        layer_ops.rms_norm(x.clone(), reference.weight.data, out, eps=1e-5)
        return out

    with torch.no_grad():
        expected = reference(x)
    out = on_every_isa(run)
    if dtype == "bf16":  # the sum's order decides about rounding only at rare borders
        assert (out != expected).float().mean() < 1e-3
    assert relative_error(out, expected) < (1e-4 if dtype == "bf16" else 1e-6)


@each_dtype
def test_rms_norm_adds_the_delta_first(dtype: str) -> None:
    hidden, delta, weight = (
        random(5, 70, dtype),
        random(5, 70, dtype, 1),
        random(1, 70, dtype, 2)[0],
    )
    expected_hidden, expected = hidden + delta, poisoned(5, 70, dtype)
    layer_ops.rms_norm(expected_hidden.clone(), weight, expected, eps=1e-6)

    def run() -> torch.Tensor:
        changed, out = hidden.clone(), poisoned(5, 70, dtype)
        layer_ops.rms_norm(changed, weight, out, eps=1e-6, delta=delta)
        return torch.stack([changed, out])

    changed, out = on_every_isa(run)
    assert torch.equal(changed, expected_hidden)
    assert torch.equal(out, expected)


def angles(n_positions: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1e4 ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    table = torch.arange(n_positions)[:, None].float() * frequencies
    return table.cos(), table.sin()


@each_dtype
@pytest.mark.parametrize(("n_q", "n_kv", "dim"), [(8, 2, 32), (3, 3, 16), (4, 1, 128)])
def test_rotary_is_transformers(dtype: str, n_q: int, n_kv: int, dim: int) -> None:
    n_rows, torch_dtype = 77, TORCH_DTYPES[dtype]
    qkv = random(n_rows, (n_q + 2 * n_kv) * dim, dtype)
    positions = torch.randint(0, 500, (n_rows,), generator=torch.Generator().manual_seed(0))
    cos, sin = angles(500, dim)

    def run() -> torch.Tensor:
        q, k, v = (poisoned(n_rows, heads * dim, dtype) for heads in (n_q, n_kv, n_kv))
        at = positions.int()
        heads = {"n_q_heads": n_q, "n_kv_heads": n_kv, "head_dim": dim}
        layer_ops.rotary(qkv, at, cos, sin, q, k, v, **heads)
        return torch.cat([q, k, v], dim=1)

    full = [torch.cat((t, t), -1)[positions].to(torch_dtype)[None] for t in (cos, sin)]
    q, k, v = qkv.split([n_q * dim, n_kv * dim, n_kv * dim], dim=1)
    q, k = (x.view(n_rows, -1, dim).transpose(0, 1)[None] for x in (q, k))
    q, k = modeling_mixtral.apply_rotary_pos_emb(q, k, *full)
    q, k = (x[0].transpose(0, 1).reshape(n_rows, -1) for x in (q, k))
    out = on_every_isa(run)
    if dtype == "bf16":
        assert torch.equal(out, torch.cat([q, k, v], dim=1))
    assert relative_error(out, torch.cat([q, k, v], dim=1)) < 1e-6


def test_rotary_writes_rows_where_the_index_says_and_leaves_the_rest_of_a_head() -> None:
    qkv, dim, rotary_dim = random(3, 4 * 48, "fp32"), 48, 20
    cos, sin = angles(10, rotary_dim)
    slots = [torch.full((6, 2, dim), torch.nan), *(torch.full((6, dim), torch.nan),) * 2]
    slots = [slots[0], slots[1], slots[2].clone()]
    index = torch.tensor([4, 0, 5], dtype=torch.int32)
    at = torch.tensor([0, 3, 9], dtype=torch.int32)
    heads = {"n_q_heads": 2, "n_kv_heads": 1, "head_dim": dim}
    layer_ops.rotary(qkv, at, cos, sin, *slots, out_index=index, **heads)
    q = slots[0][index.long()]
    assert torch.equal(slots[2][index.long()], qkv[:, 3 * dim :])
    assert torch.equal(q[..., rotary_dim:], qkv[:, : 2 * dim].view(3, 2, dim)[..., rotary_dim:])
    assert torch.equal(q[0], qkv[0, : 2 * dim].view(2, dim))  # position 0 turns nothing
    assert all(slot[[1, 2, 3]].isnan().all() for slot in slots)


@each_dtype
@pytest.mark.parametrize(("n_experts", "top_k"), [(8, 2), (1, 1), (60, 4), (128, 8), (17, 17)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_is_softmax_then_top_k(
    dtype: str, n_experts: int, top_k: int, renormalise: bool
) -> None:
    logits = random(99, n_experts, dtype) * 2
    probabilities = torch.softmax(logits.double(), dim=-1)

    def run() -> torch.Tensor:
        experts = torch.full((99, top_k), -1, dtype=torch.int32)
        weights = poisoned(99, top_k, "fp32")
        layer_ops.route(logits, experts, weights, renormalise=renormalise)
        return torch.stack([experts.double(), weights.double()])

    chosen, weights = on_every_isa(run)
    # Stable: of equal logits the lower expert first.
    expected = probabilities.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    assert torch.equal(chosen.long(), expected)
    values = probabilities.gather(1, expected)
    if renormalise:
        values /= values.sum(dim=-1, keepdim=True)
    assert relative_error(weights, values) < 1e-6


def test_routing_survives_extreme_logits() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 4, [-inf, 0.0, -inf, -inf], [3e38, -3e38, 3e38, 0.0], [nan, 1.0, 2.0, 0.0]]
    experts = torch.full((4, 2), -1, dtype=torch.int32)
    weights = poisoned(4, 2, "fp32")
    layer_ops.route(torch.tensor(rows), experts, weights)
    for row in experts.tolist():
        assert len(set(row)) == 2 and all(0 <= expert < 4 for expert in row)
    assert experts[1, 0] == 1 and weights[1, 0] == 1
    assert experts[2].tolist() == [0, 2] and weights[2].tolist() == [0.5, 0.5]


def test_sorting_groups_rows_by_expert_in_order() -> None:
    experts = torch.randint(0, 11, (200, 3), generator=torch.Generator().manual_seed(0)).int()
    offsets, row_index, position = (torch.full((n,), -1, dtype=torch.int32) for n in (12, 600, 600))
    layer_ops.sort_by_expert(experts, 11, offsets, row_index, position.view(200, 3))
    order = experts.flatten().argsort(stable=True)
    assert torch.equal(row_index.long(), order // 3)
    assert torch.equal(position[order], torch.arange(600, dtype=torch.int32))
    assert offsets.tolist() == [0, *np.cumsum(np.bincount(experts.flatten().numpy(), minlength=11))]


@each_dtype
@pytest.mark.parametrize("with_residual", [True, False])
def test_combining_adds_in_order_of_expert(dtype: str, with_residual: bool) -> None:
    n_rows, top_k, n = 23, 4, 75
    parts = random(n_rows * top_k, n, dtype)
    generator = torch.Generator().manual_seed(0)
    position = torch.randperm(n_rows * top_k, generator=generator).view(n_rows, top_k).int()
    weights = torch.rand(n_rows, top_k, generator=generator)
    residual = random(n_rows, n, dtype, 1) if with_residual else None

    def run() -> torch.Tensor:
        out = poisoned(n_rows, n, dtype)
        layer_ops.combine(parts, position, weights, out, residual=residual)
        return out

    places, order = position.sort(dim=1)
    expected = torch.zeros(n_rows, n, dtype=TORCH_DTYPES[dtype])
    for j in range(top_k):  # as transformers' index_add_ over ascending experts
        scaled = parts[places[:, j].long()] * weights.gather(1, order)[:, j, None]
        expected += scaled.to(expected.dtype)
    if residual is not None:
        expected = residual + expected
    assert torch.equal(on_every_isa(run), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathering_copies_rows(dtype: torch.dtype) -> None:
    table = random(50, 33, "fp32").to(dtype)
    ids = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    out = torch.full((4, 33), torch.nan, dtype=dtype)
    layer_ops.gather_rows(table, ids, out)
    assert torch.equal(out, table[ids.long()])


@each_dtype
@pytest.mark.parametrize("n", [1, 15, 16, 17, 1000])
def test_argmax_is_the_first_of_the_largest(dtype: str, n: int) -> None:
    x = random(67, n, dtype).mul(2).round()  # many ties
    x[0] = -torch.inf

    def run() -> torch.Tensor:
        out = torch.full((67,), -2)
        layer_ops.argmax(x, out)
        return out

    expected = torch.from_numpy(x.float().numpy().argmax(axis=1))
    assert torch.equal(on_every_isa(run), expected)


def test_argmax_reports_a_nan() -> None:
    x = random(3, 100, "fp32")
    x[1, 77] = torch.nan
    out = torch.zeros(3, dtype=torch.int64)
    layer_ops.argmax(x, out)
    assert out[1] == -1 and out[0] >= 0 and out[2] >= 0


def test_conversion_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1e-45, 1.00390625, 1.01171875]
    values = torch.from_numpy(np.concatenate([bits.view(np.float32), np.float32(special)]))

    def run() -> torch.Tensor:
        out = torch.zeros(len(values), dtype=torch.bfloat16)
        layer_ops.convert(values, out)
        back = torch.zeros(len(values))
        layer_ops.convert(out, back)
        assert torch.equal(back.nan_to_num(), out.float().nan_to_num())
        return out.nan_to_num(nan=123.0)

    assert torch.equal(on_every_isa(run), values.bfloat16().nan_to_num(nan=123.0))


def test_wrong_arguments_are_named() -> None:
    x, ids = random(3, 8, "fp32"), torch.tensor([0, 3, 1], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match=r"ids\[1\]: 3 is not between 0 and 2"):
        layer_ops.gather_rows(x, ids, poisoned(3, 8, "fp32"))
    with pytest.raises(InvalidArgumentError, match="weight: must hold 8 elements"):
        layer_ops.rms_norm(x, x[0, :7], x, eps=1e-5)
    with pytest.raises(InvalidArgumentError, match=r"positions\[1\]: 3 is not between 0 and 2"):
        table = random(3, 1, "fp32")
        heads = {"n_q_heads": 2, "n_kv_heads": 1, "head_dim": 2}
        layer_ops.rotary(x, ids, table, table, x[:, :4], x[:, :2], x[:, :2], **heads)
    with pytest.raises(InvalidArgumentError, match=r"experts\[1\]: 3 is not between 0 and 2"):
        layer_ops.sort_by_expert(ids.view(3, 1), 3, ids, ids, ids)
    with pytest.raises(InvalidArgumentError, match="out: is fp32, must be int64"):
        layer_ops.argmax(x, x[:, 0].contiguous())
