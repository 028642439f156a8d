"""What the tests of the CPU compute share: packed weights of random tensors, instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from native import gemm

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# FP32 accumulation over k in order: error grows like the square root of k; these leave 4x of room
# at k = 3000.
SUM_TOLERANCE = 4e-6
# Half a unit in BF16's last place is 2^-9 of the value.
BF16_TOLERANCE = 2.5e-3


def packed(weight: torch.Tensor, dtype: str) -> gemm.PackedWeight:
    """`weight` packed on its own."""
    result = gemm.allocate(weight.shape[0], weight.shape[1], dtype)
    gemm.pack(result, weight)
    return result


def packed_pair(gate: torch.Tensor, up: torch.Tensor, dtype: str) -> gemm.PackedWeight:
    """gate and up packed as a pair."""
    result = gemm.allocate(gate.shape[0], gate.shape[1], dtype, pair=True)
    gemm.pack(result, gate, role="gate")
    gemm.pack(result, up, role="up")
    return result


def random(rows: int, columns: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rows * 1009 + columns)
    return torch.randn(rows, columns, generator=generator).to(TORCH_DTYPES[dtype])


def poisoned(rows: int, columns: int, dtype: str) -> torch.Tensor:
    """NaN everywhere: what a kernel does not write shows."""
    return torch.full((rows, columns), float("nan"), dtype=TORCH_DTYPES[dtype])


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Selects an instruction set for the CPU compute."""
    before = gemm.selected_isa()
    gemm.select_isa(name)
    try:
        yield
    finally:
        gemm.select_isa(before)
