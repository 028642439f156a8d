"""The KV block pool: which blocks are free, and which to hand out so that runs stay contiguous.

Free blocks are bytes of value 1 in a bytearray, so that looking for a run of n blocks is one
`find` in C. The cursor moves round the pool (next fit): requests of like length finish in the order
in which they came, which leaves their places free as whole runs.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from planner.errors import InvalidInputError
from planner.request import BlockId
from planner.units import div_ceil

# Room left behind a run for its owner to grow into. Others use it once the cursor comes round.
MAX_ROOM_BLOCKS = 32


class IntegrityError(RuntimeError):
    """A block is lost, owned twice, or freed twice: a bug, never a normal outcome."""


class BlockPool:
    """A fixed number of KV blocks of `block_tokens` tokens each."""

    def __init__(self, total_blocks: int, block_tokens: int = 16) -> None:
        if total_blocks < 1:
            raise InvalidInputError("total_blocks", f"must be at least 1, is {total_blocks}")
        if block_tokens < 1:
            raise InvalidInputError("block_tokens", f"must be at least 1, is {block_tokens}")
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._is_free = bytearray(b"\x01") * total_blocks
        self._free_blocks = total_blocks
        self._cursor = 0
        self._longest_run_bound = total_blocks  # no free run is longer; stale only upwards

    @property
    def free_blocks(self) -> int:
        return self._free_blocks

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self._free_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.total_blocks * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return div_ceil(tokens, self.block_tokens)

    def allocate(self, count: int, room: int = 0) -> list[BlockId] | None:
        """`count` blocks, in as few runs as the pool has; None when fewer than that are free.

        `room` is how many blocks the owner may want later: where possible the run is placed with
        that much free space behind it.
        """
        if count > self._free_blocks:
            return None
        start = self._find_run(count + min(room, MAX_ROOM_BLOCKS)) if room else -1
        if start >= 0:
            self._cursor = start + count + min(room, MAX_ROOM_BLOCKS)
            return self._take(start, count)
        return self._gather(count)

    def grow(self, last: BlockId, room: int = 0) -> BlockId | None:
        """One more block for the owner of `last`: its neighbour if free; None when none is free."""
        block = last + 1
        if block == self.total_blocks or not self._is_free[block]:
            if self._free_blocks == 0:
                return None
            room = min(room, MAX_ROOM_BLOCKS)
            block = self._find_run(1 + room)
            if block < 0:
                room = 0
                block = self._find_run(1)
            self._cursor = block + 1 + room
        self._is_free[block] = 0
        self._free_blocks -= 1
        return BlockId(block)

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Give blocks back. Raises IntegrityError when one of them is free already."""
        is_free = self._is_free
        for block in blocks:
            if is_free[block]:
                raise IntegrityError(f"block {block} was freed twice")
            is_free[block] = 1
        self._free_blocks += len(blocks)
        self._longest_run_bound = self.total_blocks

    def check_integrity(self, owners: Iterable[Sequence[BlockId]]) -> None:
        """Raise IntegrityError unless free + owned = total and no block has two owners."""
        owned: set[BlockId] = set()
        for blocks in owners:
            for block in blocks:
                if block in owned:
                    raise IntegrityError(f"block {block} is owned twice")
                if not 0 <= block < self.total_blocks or self._is_free[block]:
                    raise IntegrityError(f"block {block} is owned but not in use")
                owned.add(block)
        free = self._is_free.count(1)
        if free != self._free_blocks or free + len(owned) != self.total_blocks:
            raise IntegrityError(
                f"{self._free_blocks} blocks counted free, {free} marked free and {len(owned)}"
                f" owned do not make {self.total_blocks}"
            )

    def _gather(self, count: int) -> list[BlockId]:
        """`count` of the free blocks, the longest runs that halving the length finds first."""
        blocks: list[BlockId] = []
        wanted = count
        while len(blocks) < count:
            wanted = min(wanted, count - len(blocks), self._longest_run_bound)
            start = self._find_run(wanted)
            if start < 0:
                wanted = max(1, wanted // 2)
                continue
            self._cursor = start + wanted
            blocks += self._take(start, wanted)
        return blocks

    def _find_run(self, length: int) -> int:
        """Start of a free run at or after the cursor, else from the start; -1 when there is none.

        A search that failed is remembered until blocks are freed: taking blocks only shortens runs.
        """
        if length > self._longest_run_bound:
            return -1
        run = b"\x01" * length
        start = self._is_free.find(run, self._cursor)
        if start < 0:
            start = self._is_free.find(run, 0, self._cursor + length - 1)
        if start < 0:
            self._longest_run_bound = length - 1
        return start

    def _take(self, start: int, count: int) -> list[BlockId]:
        self._is_free[start : start + count] = bytes(count)
        self._free_blocks -= count
        return [BlockId(block) for block in range(start, start + count)]


def contiguity(blocks: Sequence[BlockId]) -> float:
    """Share of a sequence's neighbouring block pairs that are neighbours in memory too (0 … 1)."""
    if len(blocks) < 2:
        return 1.0
    return sum(after == before + 1 for before, after in pairwise(blocks)) / (len(blocks) - 1)
