"""Where a stage's weights are when the device needs them."""

from typing import Protocol

from gpu_worker.mover import MoverStats
from gpu_worker.ops import Ops
from gpu_worker.weights import BlockWeights, HostStore


class StageWeights(Protocol):
    """The base block, and the stages' blocks in the order in which a pass uses them."""

    base: BlockWeights

    def begin_pass(self) -> None:
        """The first stage comes next, whatever became of the pass before."""
        ...

    def acquire(self, stage: int) -> BlockWeights:
        """The stage's weights on the device; blocks until they have arrived."""
        ...

    def release(self, stage: int) -> None:
        """The work that was given to the device is the last that uses them."""
        ...

    def stats(self) -> MoverStats:
        """What was moved so far."""
        ...

    def close(self) -> None: ...


class WeightsInPlace:
    """Device `cpu` without a link: the store is the device's memory."""

    def __init__(self, store: HostStore, ops: Ops) -> None:
        self.base = BlockWeights(store.base, store.base_bytes(), ops)
        self._stages = [
            BlockWeights(block, store.stage_bytes(i), ops) for i, block in enumerate(store.stages)
        ]

    def acquire(self, stage: int) -> BlockWeights:
        return self._stages[stage]

    def begin_pass(self) -> None:
        """Every stage is there."""

    def release(self, stage: int) -> None:
        """They stay."""

    def stats(self) -> MoverStats:
        return MoverStats()

    def close(self) -> None:
        """Nothing runs."""
