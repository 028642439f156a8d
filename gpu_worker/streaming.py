"""Where a stage's weights are when the device needs them."""

from typing import Protocol

from gpu_worker.ops import Ops
from gpu_worker.weights import BlockWeights, HostStore


class StageWeights(Protocol):
    """The base block, and the stages' blocks in the order in which a pass uses them."""

    base: BlockWeights

    def acquire(self, stage: int) -> BlockWeights:
        """The stage's weights on the device; blocks until they have arrived."""
        ...

    def release(self, stage: int) -> None:
        """The device is done with them; their place may be filled with others."""
        ...


class WeightsInPlace:
    """Device `cpu` without a link: the store is the device's memory."""

    def __init__(self, store: HostStore, ops: Ops) -> None:
        self.base = BlockWeights(store.base, store.base_bytes(), ops)
        self._stages = [
            BlockWeights(block, store.stage_bytes(i), ops) for i, block in enumerate(store.stages)
        ]

    def acquire(self, stage: int) -> BlockWeights:
        return self._stages[stage]

    def release(self, stage: int) -> None:
        """They stay."""
