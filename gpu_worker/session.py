"""The sequences of one session: token histories, block-table rows, and plans turned into batches.

The invariant: `computed` tokens of a sequence have their KV in the CPU worker's cache, at the
positions and blocks that plans gave them; a chunk continues exactly there. A plan is checked as a
whole before anything of it changes the session.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from moelens.v1 import gpu_worker_pb2
from numpy.typing import NDArray

from gpu_worker.errors import PlanError
from gpu_worker.sampler import Sampling
from gpu_worker.sampling_params import check_sampling, sampling_of

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class SessionLimits:
    """What a plan may ask for; the same numbers that GetInfo reports."""

    vocab_size: int
    max_context_tokens: int
    max_step_tokens: int
    max_sequences: int
    kv_blocks: int


class Sequence:
    """One sequence's tokens and how many of them have KV."""

    def __init__(
        self,
        sequence_id: int,
        row: int,
        tokens: NDArray[np.int64],
        prompt_tokens: int,
        sampling: Sampling,
    ) -> None:
        self.sequence_id = sequence_id
        self.row = row
        self.prompt_tokens = prompt_tokens
        self.sampling = sampling
        self.computed_tokens = 0
        self.blocks: list[int] = []
        # Why no token could be sampled; the sequence then takes no further part.
        self.failure: str | None = None
        self._tokens = np.empty(max(64, 2 * len(tokens)), dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        self.known_tokens = len(tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """All known tokens."""
        return self._tokens[: self.known_tokens]

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        if self.known_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.known_tokens] = token_id
        self.known_tokens += 1


@dataclass(frozen=True)
class Chunk:
    """Tokens start … start + count - 1 of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass
class Batch:
    """What a plan asks the engine to compute, and what it cannot."""

    step_id: int
    chunks: list[Chunk] = field(default_factory=list)
    # Sequences that failed in an earlier step and are still in this plan.
    failed: list[Sequence] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)


SetBlocks = Callable[[int, int, list[int]], None]


class Session:
    """State between the first plan and the end of the stream."""

    def __init__(self, limits: SessionLimits, set_blocks: SetBlocks) -> None:
        self.limits = limits
        self._set_blocks = set_blocks
        self.sequences: dict[int, Sequence] = {}
        self._free_rows = list(range(limits.max_sequences - 1, -1, -1))
        self._block_owner: dict[int, int] = {}

    def apply(self, plan: gpu_worker_pb2.StepPlan) -> Batch:
        """Check a plan, then take it over. PlanError leaves the session as it was."""
        released = self._check_released(plan)
        starting = self._check_starts(plan, released)
        new_blocks = self._check_chunks(plan, released, starting)
        for sequence_id in released:
            self._release(self.sequences.pop(sequence_id))
        for start in plan.starts:
            self._start(start)
        return self._take_chunks(plan, new_blocks)

    # -- checks ---------------------------------------------------------------------------------

    def _check_released(self, plan: gpu_worker_pb2.StepPlan) -> set[int]:
        released = set(plan.released_sequence_ids)
        unknown = released - self.sequences.keys()
        if unknown:
            raise PlanError(
                "plan.released_sequence_ids", f"sequence {min(unknown)} is not in the session"
            )
        return released

    def _check_starts(
        self, plan: gpu_worker_pb2.StepPlan, released: set[int]
    ) -> dict[int, gpu_worker_pb2.SequenceStart]:
        """The plan's starts by sequence id."""
        starting: dict[int, gpu_worker_pb2.SequenceStart] = {}
        for i, start in enumerate(plan.starts):
            where = f"plan.starts[{i}]"
            known = start.sequence_id in self.sequences and start.sequence_id not in released
            if known or start.sequence_id in starting:
                raise PlanError(
                    f"{where}.sequence_id", f"{start.sequence_id} is already in the session"
                )
            self._check_start(start, where)
            starting[start.sequence_id] = start
        n_sequences = len(self.sequences) - len(released) + len(starting)
        if n_sequences > self.limits.max_sequences:
            raise PlanError(
                "plan.starts",
                f"{n_sequences} sequences would run, at most {self.limits.max_sequences} may",
            )
        return starting

    def _check_start(self, start: gpu_worker_pb2.SequenceStart, where: str) -> None:
        n_tokens = len(start.token_ids)
        longest = self.limits.max_context_tokens
        if not 1 <= n_tokens <= longest:
            raise PlanError(f"{where}.token_ids", f"{n_tokens} tokens; 1 to {longest} are possible")
        if not 1 <= start.prompt_tokens <= n_tokens:
            raise PlanError(
                f"{where}.prompt_tokens", f"must be 1 to {n_tokens}, is {start.prompt_tokens}"
            )
        highest = max(start.token_ids)
        if highest >= self.limits.vocab_size:
            raise PlanError(
                f"{where}.token_ids",
                f"token id {highest} is outside the vocabulary of {self.limits.vocab_size}",
            )
        check_sampling(start.sampling, self.limits.vocab_size, f"{where}.sampling")

    def _check_chunks(
        self,
        plan: gpu_worker_pb2.StepPlan,
        released: set[int],
        starting: dict[int, gpu_worker_pb2.SequenceStart],
    ) -> list[list[int]]:
        """The new KV blocks of every chunk."""
        _check_lengths(plan)
        n_tokens = sum(plan.chunk_token_counts)
        if n_tokens > self.limits.max_step_tokens:
            raise PlanError(
                "plan.chunk_token_counts",
                f"{n_tokens} tokens in all, at most {self.limits.max_step_tokens} are possible",
            )
        ids = list(plan.chunk_sequence_ids)
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise PlanError("plan.chunk_sequence_ids", f"sequence {twice} has two chunks")
        for i, sequence_id in enumerate(ids):
            if sequence_id in starting:
                self._check_chunk(plan, i, 0, len(starting[sequence_id].token_ids), 0)
                continue
            sequence = self.sequences.get(sequence_id)
            if sequence is None or sequence_id in released:
                raise PlanError(
                    f"plan.chunk_sequence_ids[{i}]", f"sequence {sequence_id} is not in the session"
                )
            if sequence.failure is None:
                self._check_chunk(
                    plan, i, sequence.computed_tokens, sequence.known_tokens, len(sequence.blocks)
                )
        return self._check_blocks(plan, released)

    def _check_chunk(
        self, plan: gpu_worker_pb2.StepPlan, i: int, computed: int, known: int, n_blocks: int
    ) -> None:
        """One chunk against what is known of its sequence."""
        start, count = plan.chunk_start_positions[i], plan.chunk_token_counts[i]
        if start != computed:
            raise PlanError(
                f"plan.chunk_start_positions[{i}]",
                f"is {start}; {computed} tokens of the sequence are computed",
            )
        if not 1 <= count <= known - start:
            raise PlanError(
                f"plan.chunk_token_counts[{i}]",
                f"is {count}; {known - start} tokens of the sequence are known and not computed",
            )
        if plan.chunk_samples[i] != (start + count == known):
            raise PlanError(
                f"plan.chunk_samples[{i}]",
                f"is {plan.chunk_samples[i]}, but the chunk ends at {start + count} of {known}",
            )
        if start + count > self.limits.max_context_tokens:
            raise PlanError(
                f"plan.chunk_token_counts[{i}]",
                f"reaches position {start + count} beyond {self.limits.max_context_tokens}",
            )
        # A prompt computed in several chunks may get all of its blocks with the first.
        needed, most = -(-(start + count) // BLOCK_TOKENS), -(-known // BLOCK_TOKENS)
        if not needed <= n_blocks + plan.chunk_new_block_counts[i] <= most:
            raise PlanError(
                f"plan.chunk_new_block_counts[{i}]",
                f"is {plan.chunk_new_block_counts[i]}; {start + count} tokens need {needed} "
                f"blocks, the {known} known ones {most}, and the sequence has {n_blocks}",
            )

    def _check_blocks(self, plan: gpu_worker_pb2.StepPlan, released: set[int]) -> list[list[int]]:
        blocks = list(plan.new_blocks)
        if sum(plan.chunk_new_block_counts) != len(blocks):
            raise PlanError(
                "plan.new_blocks",
                f"has {len(blocks)} entries; chunk_new_block_counts add up to "
                f"{sum(plan.chunk_new_block_counts)}",
            )
        if len(set(blocks)) != len(blocks):
            raise PlanError("plan.new_blocks", "holds a block twice")
        for block in blocks:
            if block >= self.limits.kv_blocks:
                raise PlanError(
                    "plan.new_blocks", f"block {block} does not exist ({self.limits.kv_blocks} do)"
                )
            owner = self._block_owner.get(block)
            if owner is not None and owner not in released:
                raise PlanError("plan.new_blocks", f"block {block} belongs to sequence {owner}")
        ends = np.cumsum(plan.chunk_new_block_counts).tolist() if blocks else []
        starts = [0, *ends]
        return [blocks[a:b] for a, b in zip(starts, ends, strict=False)]

    # -- changes --------------------------------------------------------------------------------

    def _release(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        for block in sequence.blocks:
            del self._block_owner[block]

    def _start(self, start: gpu_worker_pb2.SequenceStart) -> None:
        tokens = np.fromiter(start.token_ids, dtype=np.int64, count=len(start.token_ids))
        self.sequences[start.sequence_id] = Sequence(
            start.sequence_id,
            self._free_rows.pop(),
            tokens,
            start.prompt_tokens,
            sampling_of(start.sampling),
        )

    def _take_chunks(self, plan: gpu_worker_pb2.StepPlan, new_blocks: list[list[int]]) -> Batch:
        batch = Batch(plan.step_id)
        columns: Iterable[tuple[int, int, int, bool]] = zip(
            plan.chunk_sequence_ids,
            plan.chunk_start_positions,
            plan.chunk_token_counts,
            plan.chunk_samples,
            strict=True,
        )
        for i, (sequence_id, start, count, samples) in enumerate(columns):
            sequence = self.sequences[sequence_id]
            if new_blocks and new_blocks[i]:
                self._give_blocks(sequence, new_blocks[i])
            if sequence.failure is not None:
                batch.failed.append(sequence)
                continue
            sequence.computed_tokens += count
            batch.chunks.append(Chunk(sequence, start, count, samples))
        return batch

    def _give_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        self._set_blocks(sequence.row, len(sequence.blocks), blocks)
        sequence.blocks.extend(blocks)
        self._block_owner.update(dict.fromkeys(blocks, sequence.sequence_id))


def _check_lengths(plan: gpu_worker_pb2.StepPlan) -> None:
    """The parallel arrays of chunks are equally long."""
    n_chunks = len(plan.chunk_sequence_ids)
    for name in (
        "chunk_start_positions",
        "chunk_token_counts",
        "chunk_samples",
        "chunk_new_block_counts",
    ):
        n = len(getattr(plan, name))
        if n != n_chunks:
            raise PlanError(f"plan.{name}", f"has {n} entries, chunk_sequence_ids has {n_chunks}")
