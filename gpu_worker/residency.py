"""Which stages' weights stay on the device, and which are streamed in every pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.errors import MemoryShortage

BUFFERS = 2


@dataclass(frozen=True)
class Residency:
    """`streamed` in the order of use; all others are resident."""

    streamed: tuple[int, ...]
    resident_bytes: int
    streamed_bytes: int  # of one pass
    buffer_bytes: int  # device memory of each of the two buffers; 0 when nothing is streamed

    @property
    def resident_share(self) -> float:
        """Share of the stages' bytes that never moves."""
        total = self.resident_bytes + self.streamed_bytes
        return self.resident_bytes / total if total else 1.0


def choose(stage_bytes: Sequence[int], budget_bytes: int) -> Residency:
    """Spend `budget_bytes` on whole stages; those that are streamed are spread evenly.

    Evenly, because the mover works ahead of the device by one stage at most: between two streamed
    stages there has to be the same time everywhere.
    """
    n_stages, largest = len(stage_bytes), max(stage_bytes)
    if sum(stage_bytes) <= budget_bytes:
        n_streamed = 0
    else:
        n_streamed = max(1, n_stages - max(0, budget_bytes) // largest)
    streamed = tuple(i * n_stages // n_streamed for i in range(n_streamed))
    moving = sum(stage_bytes[stage] for stage in streamed)
    buffer_bytes = max((stage_bytes[stage] for stage in streamed), default=0)
    return Residency(streamed, sum(stage_bytes) - moving, moving, buffer_bytes)


def choose_for_memory(
    stage_bytes: Sequence[int], fixed_bytes: Sequence[tuple[str, int]], memory_bytes: int
) -> Residency:
    """What a device with `memory_bytes` can keep beside `fixed_bytes` and the two buffers.

    MemoryShortage, itemised, where not even the buffers fit.
    """
    left_bytes = memory_bytes - sum(n for _, n in fixed_bytes)
    if sum(stage_bytes) <= left_bytes:
        return choose(stage_bytes, left_bytes)
    buffers_bytes = BUFFERS * max(stage_bytes)
    if buffers_bytes > left_bytes:
        items = [*fixed_bytes, ("two stages' weights", buffers_bytes)]
        raise MemoryShortage("device memory", items, memory_bytes)
    return choose(stage_bytes, left_bytes - buffers_bytes)
