"""Clients that ask for ever, and compare every token with the undisturbed run."""

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayStub

RETRY_S = 0.05


@dataclass(frozen=True)
class Request:
    """One of the requests that the lanes repeat."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    banned: tuple[int, ...] = ()  # ids that are never drawn

    def message(self) -> messages.GenerateRequest:
        """As it goes over the wire."""
        request = messages.GenerateRequest(
            token_ids=messages.TokenIds(ids=self.prompt), max_tokens=self.max_tokens
        )
        request.sampling.temperature = self.temperature
        request.sampling.seed = self.seed
        request.sampling.ignore_eos = True
        for token_id in self.banned:
            request.sampling.logit_bias[token_id] = -100.0
        return request


def requests(count: int, seed: int, longest: int = 200, vocabulary: int = 4096) -> list[Request]:
    """Mixed lengths, half of them greedy, half drawn with a seed."""
    draw = random.Random(seed)
    return [
        Request(
            tuple(draw.randrange(3, vocabulary) for _ in range(draw.randint(1, longest))),
            draw.randint(16, longest),
            0.0 if index % 2 == 0 else 0.9,
            draw.getrandbits(32),
        )
        for index in range(count)
    ]


async def token_ids(stub: GatewayStub, request: Request) -> tuple[int, ...]:
    """One request's output."""
    ids: list[int] = []
    async for event in stub.Generate(request.message()):
        ids += event.tokens.token_ids
    return tuple(ids)


async def reference(stub: GatewayStub, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    """What an undisturbed run gives; twice, so that nothing is compared with a chance result."""
    first, second = [
        await asyncio.gather(*(token_ids(stub, request) for request in asked)) for _ in range(2)
    ]
    assert first == second, "two undisturbed runs differ"
    return first


@dataclass
class Lane:
    """One client, with one stream at a time."""

    index: int
    tokens_at: list[float] = field(default_factory=list)  # when something came
    streams: int = 0

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest time without a token that overlaps [begin, end]."""
        times = self.tokens_at
        gaps = [
            after - before
            for before, after in itertools.pairwise(times)
            if after >= begin_s and before <= end_s
        ]
        return max(gaps, default=0.0)

    def has_token_since(self, moment_s: float) -> bool:
        """Whether a token came after that."""
        return bool(self.tokens_at) and self.tokens_at[-1] > moment_s

    def forget_before(self, moment_s: float) -> None:
        """Keep memory flat."""
        self.tokens_at = [at for at in self.tokens_at if at >= moment_s][-10_000:]


class Load:
    """`lanes` clients over the same requests, each in an order of its own.

    `violations` says what must not have happened. A stream that ended with UNAVAILABLE is one,
    unless the gateway was away at some moment of its life.
    """

    def __init__(
        self, stub: GatewayStub, asked: Sequence[Request], expected: Sequence[tuple[int, ...]]
    ) -> None:
        self.violations: list[str] = []
        self.unavailable = 0
        self.gateway_away_until_s = -math.inf  # inf: it is away
        self.lanes = [Lane(index) for index in range(len(asked))]
        self._stub = stub
        self._asked = asked
        self._expected = expected
        self._stopping = False

    @contextlib.asynccontextmanager
    async def running(self) -> "AsyncIterator[Load]":
        """All lanes ask until the end, then finish what they have begun."""
        tasks = [asyncio.create_task(self._run(lane)) for lane in self.lanes]
        try:
            yield self
        finally:
            self._stopping = True
            _, late = await asyncio.wait(tasks, timeout=120)
            for task in late:
                task.cancel()
            if late:
                self.violations.append(f"{len(late)} streams never ended")

    async def _run(self, lane: Lane) -> None:
        for index in self._order(lane):
            if self._stopping:
                return
            await self._ask(lane, index)

    def _order(self, lane: Lane) -> Iterator[int]:
        draw = random.Random(lane.index)
        while True:
            yield from draw.sample(range(len(self._asked)), len(self._asked))

    async def _ask(self, lane: Lane, index: int) -> None:
        begin_s = time.monotonic()
        got: list[int] = []
        finished = False
        try:
            async for event in self._stub.Generate(self._asked[index].message()):
                if event.tokens.token_ids:
                    got += event.tokens.token_ids
                    lane.tokens_at.append(time.monotonic())
                finished = finished or event.HasField("finished")
        except grpc.aio.AioRpcError as error:
            self._judge_end(lane, index, got, begin_s, error)
            await asyncio.sleep(RETRY_S)
            return
        lane.streams += 1
        if tuple(got) != self._expected[index] or not finished:
            self._blame(lane, index, f"ended OK with {_difference(got, self._expected[index])}")

    def _judge_end(
        self, lane: Lane, index: int, got: list[int], begin_s: float, error: grpc.aio.AioRpcError
    ) -> None:
        self.unavailable += 1
        was_away = self.gateway_away_until_s >= begin_s
        allowed = error.code() is grpc.StatusCode.UNAVAILABLE and was_away
        if not allowed:
            self._blame(lane, index, f"ended with {error.code().name}: {error.details()}")
        if tuple(got) != self._expected[index][: len(got)]:
            self._blame(lane, index, f"broke off with {_difference(got, self._expected[index])}")

    def _blame(self, lane: Lane, index: int, what: str) -> None:
        self.violations.append(f"lane {lane.index}, request {index}: {what}")


def _difference(got: Sequence[int], expected: Sequence[int]) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
        min(len(got), len(expected)),
    )
    return f"{len(got)} of {len(expected)} tokens, different from token {at} on"
