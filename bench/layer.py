"""A Mixtral layer on the CPU device without its attention: where the time goes, and the GEMM limit.

    python bench/layer.py [--threads N] [--tokens T ...] [--hidden H --inner I --experts E ...]

Runs as many layers, each with weights of its own, as exceed the caches. Of the peak: FLOP of the
products over the register-only rate of the same run. Of the read: bytes of the weights that the
tokens use over the read benchmark of the same run. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.gemm import all_cores_peak, peak_function
from native import gemm, layer_ops, moe
from native.host_memory import read_bandwidth_bytes_per_s
from native.threads import ThreadPool

PARTS = ("norm", "qkv", "rotary", "o", "route", "gate_up", "down", "combine")


@dataclass(frozen=True)
class Model:
    """Sizes of a layer; the defaults are those of the synthetic 0.8 B Mixtral."""

    hidden: int = 1024
    inner: int = 1792
    n_experts: int = 8
    top_k: int = 2
    n_q_heads: int = 16
    n_kv_heads: int = 4
    head_dim: int = 64

    @property
    def qkv_columns(self) -> int:
        """Columns of q, k and v together."""
        return (self.n_q_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def flop_per_token(self) -> int:
        """Multiplications and additions of a token's products, the router's without padding."""
        dense = self.hidden * (self.qkv_columns + self.n_q_heads * self.head_dim + self.n_experts)
        return 2 * (dense + self.top_k * 3 * self.hidden * self.inner)


class Layer:
    """One layer's packed weights and the calls that run it."""

    def __init__(self, model: Model, pool: ThreadPool) -> None:
        self.model, self.pool = model, pool
        m = model
        self.norm = torch.ones(m.hidden).bfloat16()
        self.qkv = self.packed(m.qkv_columns, m.hidden)
        self.o = self.packed(m.hidden, m.n_q_heads * m.head_dim)
        pairs = [self.packed(m.inner, m.hidden, pair=True) for _ in range(m.n_experts)]
        down = [self.packed(m.hidden, m.inner) for _ in range(m.n_experts)]
        router = self.packed(m.n_experts, m.hidden)
        groups = gemm.WeightGroup(pairs), gemm.WeightGroup(down)
        self.moe = moe.MoeWeights(router, *groups, m.top_k)

    def packed(self, n: int, k: int, *, pair: bool = False) -> gemm.PackedWeight:
        """Random weights of a scale that keeps activations near 1."""
        weight = gemm.allocate(n, k, "bf16", pair=pair)
        for role in ("gate", "up") if pair else ("plain",):
            source = (torch.randn(n, k) * k**-0.5).bfloat16()
            gemm.pack(weight, source, role=role, pool=self.pool)
        return weight

    def run(self, hidden: torch.Tensor, scratch: Scratch) -> dict[str, float]:
        """Seconds of each part; attention's output is taken to be q."""
        m, pool, s, times = self.model, self.pool, scratch, {}
        heads = {"n_q_heads": m.n_q_heads, "n_kv_heads": m.n_kv_heads, "head_dim": m.head_dim}
        start = time.perf_counter()

        def done(part: str) -> None:
            nonlocal start
            now = time.perf_counter()
            times[part] = times.get(part, 0.0) + now - start
            start = now

        layer_ops.rms_norm(hidden, self.norm, s.normed, eps=1e-5, pool=pool)
        done("norm")
        gemm.linear(s.normed, self.qkv, s.qkv, pool=pool)
        done("qkv")
        layer_ops.rotary(s.qkv, s.positions, s.cos, s.sin, s.q, s.k, s.v, pool=pool, **heads)
        done("rotary")
        gemm.linear(s.q, self.o, hidden, residual=hidden, pool=pool)
        done("o")
        layer_ops.rms_norm(hidden, self.norm, s.normed, eps=1e-5, pool=pool)
        done("norm")
        parts = moe.moe(
            s.normed, self.moe, hidden, workspace=s.workspace, residual=hidden, pool=pool
        )
        for part in ("route", "gate_up", "down", "combine"):
            times[part] = getattr(parts, f"{part}_s")
        return times


class Scratch:
    """Activations between the calls, for `n_tokens` tokens."""

    def __init__(self, model: Model, n_tokens: int) -> None:
        def rows(n_columns: int) -> torch.Tensor:
            return torch.empty(n_tokens, n_columns).bfloat16()

        self.normed, self.qkv = rows(model.hidden), rows(model.qkv_columns)
        self.q = rows(model.n_q_heads * model.head_dim)
        self.k, self.v = (rows(model.n_kv_heads * model.head_dim) for _ in range(2))
        self.positions = torch.arange(n_tokens, dtype=torch.int32)
        self.cos = torch.rand(n_tokens, model.head_dim // 2)
        self.sin = torch.rand(n_tokens, model.head_dim // 2)
        self.workspace = moe.Workspace()


def weight_bytes(model: Model, n_tokens: int) -> float:
    """Expected bytes of weights that `n_tokens` tokens with independent experts read."""
    missed = (1 - model.top_k / model.n_experts) ** n_tokens
    experts = model.n_experts * (1 - missed) * 3 * model.hidden * model.inner
    dense = model.hidden * (model.qkv_columns + model.n_q_heads * model.head_dim)
    return 2 * (dense + experts)


def measure(layers: list[Layer], n_tokens: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Median seconds of a layer and of its parts."""
    model = layers[0].model
    hidden = torch.randn(n_tokens, model.hidden).bfloat16()
    # A single thread's own time leaves out what others on the machine take.
    clock = time.thread_time if layers[0].pool.n_threads == 1 else time.perf_counter
    scratch, totals, parts = Scratch(model, n_tokens), [], []
    started = time.perf_counter()
    while len(totals) < 2 * len(layers) or time.perf_counter() - started < seconds:
        start = clock()
        parts.append(layers[len(totals) % len(layers)].run(hidden, scratch))
        totals.append(clock() - start)
        hidden.normal_()
    medians = {part: statistics.median(p[part] for p in parts) for part in PARTS}
    return statistics.median(totals), medians


def main() -> None:
    """Prints a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", nargs="*", type=int, default=(1, 8, 32, 128, 512, 2048))
    parser.add_argument("--seconds", type=float, default=1.0, help="per number of tokens")
    parser.add_argument("--layers", type=int, default=4)
    for name, value in Model().__dict__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(**{name: getattr(options, name) for name in Model().__dict__})
    pool = ThreadPool(options.threads)
    peak = all_cores_peak(peak_function(), pool.n_threads)
    read = read_bandwidth_bytes_per_s(pool=pool)
    print(f"{pool.n_threads} threads, peak {peak / 1e9:.0f} GFLOP/s, read {read / 1e9:.1f} GB/s")
    layers = [Layer(model, pool) for _ in range(options.layers)]
    print("tokens  ms/layer  GFLOP/s  of peak  of read " + "".join(f"{p:>9}" for p in PARTS))
    for n_tokens in options.tokens:
        total, parts = measure(layers, n_tokens, options.seconds)
        rate = n_tokens * model.flop_per_token / total
        whole = sum(parts.values())
        shares = "".join(f"{parts[part] / whole:9.1%}" for part in PARTS)
        print(
            f"{n_tokens:6} {total * 1e3:9.3f} {rate / 1e9:8.1f} {rate / peak:8.1%} "
            f"{weight_bytes(model, n_tokens) / total / read:8.1%} {shares}",
            flush=True,
        )


if __name__ == "__main__":
    main()
