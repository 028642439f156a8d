"""A step's chunks as two groups, α and β, of equal predicted cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.session import Chunk


@dataclass(frozen=True)
class ChunkCosts:
    """Seconds of one layer: the device's for a token, the CPU's for a KV token read by a decode.

    Only their ratio decides the split. The defaults are a large GEMM and one core's attention.
    """

    device_s_per_token: float = 1e-6
    attention_s_per_kv_token: float = 5e-8

    def of(self, chunk: Chunk) -> float:
        """Predicted cost of a chunk. The CPU reads the earlier KV once for all rows of a chunk."""
        return (
            chunk.count * self.device_s_per_token
            + (chunk.start + 1) * self.attention_s_per_kv_token
        )


def split(chunks: Sequence[Chunk], costs: ChunkCosts) -> list[list[Chunk]]:
    """Two groups, or one where there is a single chunk; each keeps the plan's order.

    Largest first to the group that costs less so far: chunks are many and most are equal, so this
    comes as close as matters.
    """
    if len(chunks) < 2:
        return [list(chunks)]
    totals = [0.0, 0.0]
    members: list[list[int]] = [[], []]
    by_cost = [(costs.of(chunk), i) for i, chunk in enumerate(chunks)]
    for cost, i in sorted(by_cost, key=lambda entry: (-entry[0], entry[1])):
        group = 0 if totals[0] <= totals[1] else 1
        totals[group] += cost
        members[group].append(i)
    return [[chunks[i] for i in sorted(indices)] for indices in members]
