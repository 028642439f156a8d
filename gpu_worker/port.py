"""What the engine needs of the channel to the CPU worker (native.channel.DevicePort has it)."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# One run of tokens of one sequence in a slot; the same fields as ml_item in native/abi.h.
ITEM = np.dtype(
    [
        ("row", np.uint32),
        ("start_position", np.uint32),
        ("n_tokens", np.uint32),
        ("slot_offset", np.uint32),
        ("flags", np.uint32),
    ]
)
ATTEND_EARLIER_ONLY = 2


class JobTimes(Protocol):
    """What a job cost the attention processes."""

    @property
    def elapsed_s(self) -> float:
        """From post until the device saw the end, whatever it did in between."""
        ...

    @property
    def longest_s(self) -> float:
        """What the busiest attention process worked."""
        ...

    @property
    def kv_read_bytes(self) -> int:
        """KV bytes that were read."""
        ...


class AttentionPort(Protocol):
    """One segment shared with a CPU worker; its two slots are 0 (α) and 1 (β)."""

    def q(self, slot: int) -> NDArray[Any]: ...
    def k(self, slot: int) -> NDArray[Any]: ...
    def v(self, slot: int) -> NDArray[Any]: ...
    def out(self, slot: int) -> NDArray[Any]: ...
    def lse(self, slot: int) -> NDArray[Any]: ...

    def set_blocks(self, row: int, first_index: int, blocks: list[int]) -> None:
        """Append KV blocks to a sequence's row of the block table."""
        ...

    def prepare(self, slot: int, items: NDArray[Any]) -> None:
        """Describe the slot's tokens, once a step."""
        ...

    def post(self, slot: int, layer: int) -> None:
        """Start the job of one layer over the slot's q, k, v."""
        ...

    def wait(self, slot: int, timeout_s: float) -> JobTimes:
        """Block until out and lse of the posted job are there."""
        ...

    def process_spans(self, slot: int) -> list[tuple[float, float]]:
        """When each attention process worked for the slot's job, which has ended: seconds of
        time.monotonic; (0, 0) where it had no part."""
        ...

    def close(self) -> None: ...
