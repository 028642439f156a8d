"""The scheduling policy: which tokens of which sequences are computed in the next step.

The gateway's engine serves requests with it and the simulation drives the same class, so that a
prediction and an execution cannot drift apart. It knows counts and blocks, never token ids.
"""

import heapq
import itertools
from bisect import insort
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from planner.blocks import BlockPool, IntegrityError
from planner.request import BlockId, Sequence, SequenceId, SequenceState
from planner.step import Chunk, SchedulerError, SchedulerLimits, Step

__all__ = ["Chunk", "Scheduler", "SchedulerError", "SchedulerLimits", "Step"]

_NO_BLOCKS: tuple[BlockId, ...] = ()
_ORDER = attrgetter("order")
_new_chunk = tuple.__new__  # half the time of calling Chunk: there is one for every decoded token


class Scheduler:
    """Continuous batching with paced admission, chunked prefill and preemption that keeps tokens.

    Calls: `schedule()` plans a step and `apply()` confirms its result. Up to any number of steps
    may be planned before the first is applied; they are executed and applied in order. That order
    is why blocks given back can be handed out again by the very next step: whoever used them has
    been computed before.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.num_preemptions = 0
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting: list[tuple[tuple[int, int, int], int, Sequence]] = []  # heap
        self._stale_entries = 0  # of that heap: sequences that ended while they waited
        self._prefilling: list[Sequence] = []  # both lists are sorted by Sequence.order
        self._decoding: list[Sequence] = []
        self._finishing: list[Sequence] = []  # planned their last token since schedule() began
        self._in_flight: deque[Step] = deque()
        self._released: list[SequenceId] = []
        self._preempted: list[SequenceId] = []
        self._credit_prompts = 0.0
        self._step_ids = itertools.count()
        self._tie_breaks = itertools.count()
        self._epoch = 0

    @property
    def running(self) -> int:
        """Sequences that hold KV blocks."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._waiting) - self._stale_entries

    @property
    def steps_in_flight(self) -> int:
        """Steps planned and not applied yet."""
        return len(self._in_flight)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by priority, then arrival.

        Raises SchedulerError when its id is in use or its KV can never fit the pool.
        """
        if sequence.sequence_id in self._sequences:
            raise SchedulerError(f"sequence_id {sequence.sequence_id} is in use")
        needed = self.pool.blocks_for(sequence.max_kv_tokens)
        if needed > self.pool.total_blocks:
            raise SchedulerError(
                f"prompt_tokens {sequence.prompt_tokens} and max_tokens {sequence.max_tokens} need"
                f" {needed} KV blocks of {self.pool.block_tokens} tokens;"
                f" the pool has {self.pool.total_blocks}"
            )
        self._sequences[sequence.sequence_id] = sequence
        self._enqueue(sequence)

    def cancel(self, sequence_id: SequenceId) -> bool:
        """Forget a sequence and free its blocks; False when it is not (or no longer) known."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._finish([sequence])
        return True

    # The one invariant: a step moves computed_tokens towards target_tokens. A sequence whose
    # difference is 1 after its prompt is decoding, any other is prefilling; there is no other
    # distinction, and a preempted sequence is one whose computed_tokens fell back to 0.
    def schedule(self) -> Step | None:
        """Plan the next step, or None when nothing can run before a step in flight is applied.

        Decodes come first, each with one token; then prompts under way, then prompts from the
        queue's head as far as tokens, blocks, pace and the running limit allow.
        """
        self._retire_finishing()
        chunks: list[Chunk] = []
        preemptions_before = self.num_preemptions
        self._plan_decodes(chunks)
        decode_count = len(chunks)
        budget_tokens = self.limits.max_step_tokens - decode_count
        budget_tokens = self._plan_prefills(chunks, budget_tokens)
        self._earn_credit()
        if self.num_preemptions == preemptions_before:
            self._plan_admissions(chunks, budget_tokens)
        if not chunks:
            return None
        step = Step(
            next(self._step_ids), chunks, decode_count, self._released, self._preempted, self._epoch
        )
        self._released, self._preempted = [], []
        self._in_flight.append(step)
        return step

    def apply(self, step: Step, finished: Collection[SequenceId] = ()) -> list[Sequence]:
        """Confirm one token for each sampling chunk of the oldest step in flight.

        Returns the sequences that ended, at max_tokens or because they are in `finished`, and frees
        their blocks. A step from before a restart is void: nothing happens, [] is returned.
        Raises SchedulerError when steps are applied out of order.
        """
        if step.epoch != self._epoch:
            return []
        if not self._in_flight or self._in_flight[0] is not step:
            raise SchedulerError(f"step {step.step_id} is not the oldest step in flight")
        self._in_flight.popleft()
        stopped = frozenset(finished)
        ended = []
        over = SequenceState.FINISHED
        for sequence, _, _, _, samples, _ in step.chunks:
            if not samples or sequence.state is over:
                continue  # ended while the step was in flight: the token is not wanted
            sequence.generated_tokens = generated_tokens = sequence.generated_tokens + 1
            if generated_tokens == sequence.max_tokens or (
                stopped and sequence.sequence_id in stopped
            ):
                ended.append(sequence)
        if ended:
            self._finish(ended)
        return ended

    def restart(self) -> list[Sequence]:
        """The KV is lost: void all steps in flight and queue everything again, tokens kept.

        Returns the sequences that were running, in the order in which they will start again.
        """
        self._epoch += 1
        self._in_flight.clear()
        self._finishing.clear()
        self._released, self._preempted = [], []  # the new worker knows nobody
        self._prefilling, self._decoding = [], []
        interrupted = sorted(
            (s for s in self._sequences.values() if s.state is not SequenceState.WAITING),
            key=_ORDER,
        )
        for sequence in self._sequences.values():
            sequence.sampled_tokens = sequence.generated_tokens
        for sequence in interrupted:
            self._forget_kv(sequence)
            self._enqueue(sequence)
        return interrupted

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks, lists and counts agree. Costs O(blocks)."""
        self.pool.check_integrity(sequence.blocks for sequence in self._sequences.values())
        for sequences, state in (
            (self._prefilling, SequenceState.PREFILLING),
            (self._decoding, SequenceState.DECODING),
        ):
            if any(s.state is not state or not s.blocks for s in sequences):
                raise IntegrityError(f"a sequence in the {state.value} list is elsewhere")
            if sequences != sorted(sequences, key=_ORDER):
                raise IntegrityError(f"the {state.value} list is out of order")
        for sequence in self._sequences.values():
            self._check_sequence(sequence)
        queued = {id(s) for _, _, s in self._waiting if s.state is SequenceState.WAITING}
        waiting = {id(s) for s in self._sequences.values() if s.state is SequenceState.WAITING}
        if queued != waiting or len(queued) != self.waiting:
            raise IntegrityError(
                f"{len(queued)} queued, {len(waiting)} waiting, {self.waiting} said"
            )

    def _check_sequence(self, sequence: Sequence) -> None:
        running = sequence.state in (SequenceState.PREFILLING, SequenceState.DECODING)
        if running != bool(sequence.blocks):
            raise IntegrityError(f"{sequence} holds blocks when it should not, or none")
        if running and self.pool.blocks_for(sequence.computed_tokens) > len(sequence.blocks):
            raise IntegrityError(f"{sequence} has computed more tokens than its blocks hold")
        if not 0 <= sequence.unconfirmed_tokens <= len(self._in_flight):
            raise IntegrityError(f"{sequence} awaits {sequence.unconfirmed_tokens} tokens")

    def _plan_decodes(self, chunks: list[Chunk]) -> None:
        """One token for every decoding sequence, preempting from the youngest when KV runs out.

        Victims are at the end of the list and lose their place before they are reached.
        """
        block_tokens = self.pool.block_tokens
        plan = chunks.append
        for sequence in self._decoding:
            position = sequence.computed_tokens
            new_blocks = _NO_BLOCKS
            if position % block_tokens == 0:
                block = self._grow(sequence)
                if block is None:
                    break  # it was itself the youngest
                new_blocks = (block,)
            sequence.computed_tokens = position + 1
            sequence.sampled_tokens = sampled_tokens = sequence.sampled_tokens + 1
            if sampled_tokens == sequence.max_tokens:
                self._finishing.append(sequence)
            plan(_new_chunk(Chunk, (sequence, position, 1, new_blocks, True, False)))

    def _grow(self, sequence: Sequence) -> BlockId | None:
        """One more block for a decoding sequence; None when it had to be preempted itself."""
        room = self._room_blocks(sequence, len(sequence.blocks) + 1)
        while (block := self.pool.grow(sequence.blocks[-1], room)) is None:
            victim = self._youngest()
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.blocks.append(block)
        return block

    def _plan_prefills(self, chunks: list[Chunk], budget_tokens: int) -> int:
        """Continue the prompts under way, oldest first; returns the tokens left in the step."""
        if not self._prefilling:
            return budget_tokens
        under_way, self._prefilling = self._prefilling, []
        for sequence in under_way:
            if budget_tokens == 0:
                self._prefilling.append(sequence)
            else:
                budget_tokens -= self._plan_chunk(chunks, sequence, budget_tokens, _NO_BLOCKS)
        return budget_tokens

    def _plan_admissions(self, chunks: list[Chunk], budget_tokens: int) -> None:
        """Start sequences from the queue's head. The head is never overtaken.

        All blocks of the known tokens are taken at once, so that a prompt that is computed in
        several chunks never stops half-way for want of KV, and lies in one run where possible.
        """
        while budget_tokens > 0 and self.running < self.limits.running_limit:
            sequence = self._queue_head()
            if sequence is None or sequence.unconfirmed_tokens or not self._has_credit(sequence):
                return
            count = self.pool.blocks_for(sequence.known_tokens)
            blocks = self.pool.allocate(count, self._room_blocks(sequence, count))
            if blocks is None:
                return
            heapq.heappop(self._waiting)
            if sequence.num_starts == 0:
                self._credit_prompts -= 1
            sequence.num_starts += 1
            sequence.blocks = blocks
            budget_tokens -= self._plan_chunk(chunks, sequence, budget_tokens, tuple(blocks))

    def _plan_chunk(
        self,
        chunks: list[Chunk],
        sequence: Sequence,
        budget_tokens: int,
        new_blocks: SequenceOf[BlockId],
    ) -> int:
        """Plan a prefill chunk, put the sequence where it then belongs; returns its tokens."""
        start = sequence.computed_tokens
        remaining = sequence.target_tokens - start
        count = min(remaining, budget_tokens, self.limits.prefill_chunk_tokens or remaining)
        samples = count == remaining
        chunks.append(Chunk(sequence, start, count, new_blocks, samples, start == 0))
        sequence.computed_tokens = start + count
        if not samples:
            sequence.state = SequenceState.PREFILLING
            self._insert(self._prefilling, sequence)
            return count
        sequence.sampled_tokens += 1
        sequence.state = SequenceState.DECODING
        self._insert(self._decoding, sequence)
        if sequence.sampled_tokens == sequence.max_tokens:
            self._finishing.append(sequence)
        return count

    def _earn_credit(self) -> None:
        """Earn q* prompts for this step; what is left over is carried, but not hoarded.

        An idle machine starts a prompt at once, however small q* is.
        """
        pace = self.limits.prompts_per_step
        if pace is not None:
            self._credit_prompts = min(self._credit_prompts, 1.0) + pace
            if self.running == 0:
                self._credit_prompts = max(self._credit_prompts, 1.0)

    def _has_credit(self, sequence: Sequence) -> bool:
        """Whether the pace lets it start; one that was preempted has been paid for."""
        if self.limits.prompts_per_step is None or sequence.num_starts > 0:
            return True
        return self._credit_prompts >= 1.0 - 1e-9  # ten times 0.1 is a prompt

    def _room_blocks(self, sequence: Sequence, held_blocks: int) -> int:
        return self.pool.blocks_for(sequence.max_kv_tokens) - held_blocks

    def _youngest(self) -> Sequence:
        """The running sequence that is preempted first: lowest priority, then latest arrival."""
        tails = [sequences[-1] for sequences in (self._decoding, self._prefilling) if sequences]
        return max(tails, key=_ORDER)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, generated tokens kept; its KV is computed again later."""
        tail_of = self._decoding if sequence.state is SequenceState.DECODING else self._prefilling
        tail_of.pop()
        self.num_preemptions += 1
        self._preempted.append(sequence.sequence_id)
        self._release(sequence)
        self._enqueue(sequence)

    def _retire_finishing(self) -> None:
        """Free the KV of those that planned their last token in the step before.

        What follows that step may overwrite it, so planning ahead costs no capacity.
        """
        retiring = [s for s in self._finishing if s.state is SequenceState.DECODING]
        self._finishing = []
        for sequence in retiring:
            self._release(sequence)
            sequence.state = SequenceState.FINISHING
        if retiring:
            self._decoding = [s for s in self._decoding if s.state is SequenceState.DECODING]

    def _finish(self, sequences: list[Sequence]) -> None:
        """End sequences, wherever they are. Stale entries in the queue are passed over later."""
        for sequence in sequences:
            if sequence.state is SequenceState.WAITING:
                self._stale_entries += 1
            elif sequence.blocks:
                self._release(sequence)
            sequence.state = SequenceState.FINISHED
            del self._sequences[sequence.sequence_id]
        finished = SequenceState.FINISHED
        self._decoding = [s for s in self._decoding if s.state is not finished]
        self._prefilling = [s for s in self._prefilling if s.state is not finished]
        if self._stale_entries > len(self._waiting) // 2:
            self._waiting = [entry for entry in self._waiting if entry[2].state is not finished]
            heapq.heapify(self._waiting)
            self._stale_entries = 0

    def _release(self, sequence: Sequence) -> None:
        """Free its blocks and let the worker know with the next step."""
        self._released.append(sequence.sequence_id)
        self._forget_kv(sequence)

    def _forget_kv(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed_tokens = 0

    def _enqueue(self, sequence: Sequence) -> None:
        """By order, which puts a preempted sequence before all that came after it."""
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._waiting, (sequence.order, next(self._tie_breaks), sequence))

    def _queue_head(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][2]
            if sequence.state is SequenceState.WAITING:
                return sequence
            heapq.heappop(self._waiting)
            self._stale_entries -= 1
        return None

    @staticmethod
    def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
        if not sequences or sequences[-1].order < sequence.order:
            sequences.append(sequence)
        else:
            insort(sequences, sequence, key=_ORDER)
