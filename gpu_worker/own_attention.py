"""Attention inside prefill chunks, on the device, and its merge with the CPU's over earlier KV.

Each row of a chunk attends to the chunk's own tokens up to itself here, and to all tokens before
the chunk on the CPU; the two are merged by their log-sum-exps.
"""

import itertools
from collections.abc import Sequence

import torch

from gpu_worker.session import Chunk

Tensor = torch.Tensor

# Query rows whose scores exist at the same time where there is no flash attention.
TILE_ROWS = 256


def causal_by_chunk(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each of the chunks that lie one after the other.

    q (tokens, q heads, dim), k and v (tokens, kv heads, dim). Returns out (tokens, q heads, dim)
    and the natural log-sum-exp in FP32 (tokens, q heads).
    """
    if q.is_cuda and q.dtype != torch.float32:
        return _flash(q, k, v, counts, scale)
    outs, lses = [], []
    start = 0
    for count in counts:
        rows = slice(start, start + count)
        out, lse = _plain(q[rows], k[rows], v[rows], scale)
        outs.append(out)
        lses.append(lse)
        start += count
    return torch.cat(outs), torch.cat(lses)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """One attention output from two over disjoint KV: (out, lse) each, out in any float type.

    A side that saw nothing has lse -inf; not both may.
    """
    (out_a, lse_a), (out_b, lse_b) = first, second
    highest = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = (lse_a - highest).exp(), (lse_b - highest).exp()
    share_a = (weight_a / (weight_a + weight_b)).unsqueeze(-1)
    return (out_a.float() * share_a + out_b.float() * (1 - share_a)).to(out_a.dtype)


def prefill_rows(chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
    """Rows of the chunks of more than one token, and those chunks' lengths."""
    rows: list[int] = []
    counts: list[int] = []
    start = 0
    for chunk in chunks:
        if chunk.count > 1:
            rows.extend(range(start, start + chunk.count))
            counts.append(chunk.count)
        start += chunk.count
    return rows, counts


def _flash(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    ends = [0, *itertools.accumulate(counts)]
    bounds = torch.tensor(ends, dtype=torch.int32, device=q.device)
    longest = max(counts)
    out, lse = varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    # The kernel gives (q heads, tokens).
    return out, lse.transpose(0, 1).contiguous()


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One chunk, a tile of rows at a time, in FP32."""
    n_tokens, n_q_heads, dim = q.shape
    group = n_q_heads // k.shape[1]
    keys = k.float().permute(1, 2, 0)  # (kv heads, dim, tokens)
    values = v.float().transpose(0, 1)  # (kv heads, tokens, dim)
    out = torch.empty(n_tokens, n_q_heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(n_tokens, n_q_heads, dtype=torch.float32, device=q.device)
    for first in range(0, n_tokens, TILE_ROWS):
        rows = slice(first, min(first + TILE_ROWS, n_tokens))
        n_rows = rows.stop - first
        # (kv heads, rows · group, dim): the query heads of a KV head share its keys.
        tile = q[rows].float().view(n_rows, -1, group, dim).permute(1, 0, 2, 3)
        scores = (tile.reshape(-1, n_rows * group, dim) @ keys[..., : rows.stop]) * scale
        hidden = torch.ones(n_rows, rows.stop, dtype=torch.bool, device=q.device).triu(first + 1)
        scores.masked_fill_(hidden.repeat_interleave(group, dim=0), float("-inf"))
        attended = scores.softmax(dim=-1) @ values[:, : rows.stop]
        shape = (-1, n_rows, group, dim)
        out[rows] = attended.view(shape).permute(1, 0, 2, 3).reshape(n_rows, n_q_heads, dim)
        sums = scores.logsumexp(dim=-1).view(-1, n_rows, group)
        lse[rows] = sums.permute(1, 0, 2).reshape(n_rows, n_q_heads)
    return out, lse
