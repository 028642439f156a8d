"""A GPU worker without a model: it checks every plan and draws tokens from a hash of the history.

The next token depends on all earlier ones and on nothing else, as with a real model: a lost,
doubled or reordered token changes everything after it.
"""

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
from moelens.v1 import gpu_worker_pb2 as messages
from moelens.v1.common_pb2 import TokenLogprobs
from moelens.v1.gpu_worker_pb2_grpc import GpuWorkerServicer, add_GpuWorkerServicer_to_server

from protos.errors import DETAILS_KEY, ResourceExhausted, ServiceError, status_details

VOCABULARY = 4096


def next_token(history: list[int], seed: int = 0, vocabulary: int = VOCABULARY) -> int:
    """The fake's model: never one of the three special tokens."""
    digest = hashlib.blake2b(repr((history, seed)).encode(), digest_size=8).digest()
    return 3 + int.from_bytes(digest, "little") % (vocabulary - 3)


def continuation(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """What an undisturbed run generates."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, seed))
    return history[len(prompt) :]


@dataclass
class Known:
    """What the worker holds of one sequence."""

    token_ids: list[int]
    prompt_tokens: int
    sampling: object
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    failed: bool = False


@dataclass
class Faults:
    """What goes wrong, and when."""

    die_after_steps: int | None = None  # ends the session with UNAVAILABLE
    hang_after_steps: int | None = None
    poison_token: int | None = None  # a sequence whose history has it fails
    loading_calls: int = 0  # GetInfo answers UNAVAILABLE so often
    failing_token: int | None = None  # a step with a sequence that has it fails as a whole
    deadly_token: int | None = None  # such a step kills the worker
    memory_tokens: int | None = None  # a step with more tokens does not fit the device


class FakeWorker(GpuWorkerServicer):
    """Executes plans; any plan that contradicts what it knows is an assertion error."""

    def __init__(
        self,
        kv_blocks: int = 512,
        max_step_tokens: int = 256,
        max_sequences: int = 64,
        context: int = 2048,
        step_s: float = 0.0,
    ) -> None:
        self.info = messages.GetInfoResponse(
            model_name="fake",
            dtype="fp32",
            kv_dtype="fp32",
            device="cpu",
            vocab_size=VOCABULARY,
            max_context_tokens=context,
            block_tokens=16,
            kv_blocks=kv_blocks,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
        )
        self.step_s = step_s
        self.faults = Faults()
        self.sessions = 0
        self.steps = 0
        self.starts = 0
        self.problem = ""
        self.may_step = asyncio.Event()
        self.may_step.set()

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def]
        if self.faults.loading_calls > 0:
            self.faults.loading_calls -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        return self.info

    async def Execute(self, requests, context):  # type: ignore[no-untyped-def]
        self.sessions += 1
        sequences: dict[int, Known] = {}
        async for request in requests:
            await self._pause(context)
            await self.may_step.wait()
            await self._fail(context, request.plan, sequences)
            try:
                result = self._step(request.plan, sequences)
            except AssertionError as error:
                self.problem = f"{error!r}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.problem)
            yield messages.ExecuteResponse(result=result)

    async def _pause(self, context) -> None:  # type: ignore[no-untyped-def]
        self.steps += 1
        await asyncio.sleep(self.step_s)
        if self.faults.die_after_steps is not None:
            self.faults.die_after_steps -= 1
            if self.faults.die_after_steps < 0:
                self.faults.die_after_steps = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the CPU worker died")
        if self.faults.hang_after_steps is not None:
            self.faults.hang_after_steps -= 1
            if self.faults.hang_after_steps < 0:
                self.faults.hang_after_steps = None
                await asyncio.sleep(3600)

    async def _fail(self, context, plan, sequences) -> None:  # type: ignore[no-untyped-def]
        histories = {s.sequence_id: list(s.token_ids) for s in plan.starts}
        histories |= {i: known.token_ids for i, known in sequences.items() if i not in histories}
        present = {token for i in plan.chunk_sequence_ids for token in histories[i]}
        if self.faults.deadly_token in present:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker died")
        if self.faults.failing_token in present:
            await _abort(context, ServiceError("ValueError: boom", reason="STEP_FAILED"))
        most = self.faults.memory_tokens
        if most is not None and sum(plan.chunk_token_counts) > most:
            await _abort(context, ResourceExhausted("no memory", reason="OUT_OF_MEMORY"))

    def _step(self, plan: messages.StepPlan, sequences: dict[int, Known]) -> messages.StepResult:
        for sequence_id in plan.released_sequence_ids:
            assert sequences.pop(sequence_id, None) is not None, f"released {sequence_id}"
        for start in plan.starts:
            assert start.sequence_id not in sequences, f"started twice: {start.sequence_id}"
            assert start.sampling.HasField("seed")
            self.starts += 1
            sequences[start.sequence_id] = Known(
                list(start.token_ids), start.prompt_tokens, start.sampling
            )
        result = messages.StepResult(step_id=plan.step_id)
        new_blocks = iter(plan.new_blocks)
        total = 0
        for index, sequence_id in enumerate(plan.chunk_sequence_ids):
            known = sequences[sequence_id]
            count = plan.chunk_token_counts[index]
            total += count
            known.blocks += [next(new_blocks) for _ in range(plan.chunk_new_block_counts[index])]
            assert plan.chunk_start_positions[index] == known.computed
            known.computed += count
            if known.failed:  # the plan was made before its failure was known
                result.errors.add(sequence_id=sequence_id, message="failed before")
                continue
            assert known.computed <= len(known.token_ids), "computes unknown tokens"
            assert math.ceil(known.computed / 16) <= len(known.blocks), "too few blocks"
            assert plan.chunk_samples[index] == (known.computed == len(known.token_ids))
            if plan.chunk_samples[index]:
                self._sample(sequence_id, known, result)
        assert next(new_blocks, None) is None
        assert 0 < total <= self.info.max_step_tokens
        owned = [block for known in sequences.values() for block in known.blocks]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert all(block < self.info.kv_blocks for block in owned)
        assert len(sequences) <= self.info.max_sequences
        result.times.total_s = self.step_s
        return result

    def _sample(self, sequence_id: int, known: Known, result: messages.StepResult) -> None:
        if self.faults.poison_token in known.token_ids:
            result.errors.add(sequence_id=sequence_id, message="logits are not finite")
            known.failed = True
            return
        token = next_token(known.token_ids, known.sampling.seed)
        if known.sampling.HasField("logprobs"):
            entry = result.logprobs.add(sequence_id=sequence_id)
            entry.token.CopyFrom(TokenLogprobs(token_id=token, logprob=-0.5))
        known.token_ids.append(token)
        result.sequence_ids.append(sequence_id)
        result.token_ids.append(token)


async def _abort(context, error: ServiceError) -> None:  # type: ignore[no-untyped-def]
    await context.abort(error.code, str(error), ((DETAILS_KEY, status_details(error)),))


@contextlib.asynccontextmanager
async def serving(worker: FakeWorker, address: str) -> AsyncIterator[grpc.aio.Server]:
    """Serve the fake at `address`."""
    server = grpc.aio.server()
    add_GpuWorkerServicer_to_server(worker, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
