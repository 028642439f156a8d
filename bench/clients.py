"""Many streaming clients at once: is every answer whole, and what does the server take for it.

    python bench/clients.py [--clients N] [--seconds S] [--model DIR] [--json FILE]

Starts the four services. Each prompt is answered once alone; then N clients, each on a connection
of its own, stream one answer after the other, and every answer has to have exactly the first one's
token ids and text. Reported: tokens/s, time to first token as the clients see it, memory (PSS) and
open files of all services before and after. Exit status 1 if anything was wrong.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
from moelens.client import AsyncClient, Collector, Options, request
from moelens.v1.gateway_pb2 import GenerateRequest
from moelens.v1.gateway_pb2_grpc import GatewayStub

from gateway.launcher import Stack, StackConfig

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"
IDLE_TIMEOUT_S = 60.0
# From then on memory should not grow.
SETTLE_SHARE = 0.25


@dataclass(frozen=True)
class Expected:
    """A request and what it is always answered with."""

    message: GenerateRequest
    token_ids: list[int]
    text: str


@dataclass
class Footprint:
    """What a set of processes holds."""

    pss_bytes: int
    open_files: int

    @classmethod
    def of(cls, roots: Sequence[int]) -> "Footprint":
        """Of these processes and all their descendants."""
        pids = [pid for root in roots for pid in (root, *_descendants(root))]
        return cls(sum(map(_pss_bytes, pids)), sum(map(_open_files, pids)))


@dataclass
class Report:
    """What was seen. Latencies are the clients'."""

    clients: int
    seconds: float
    answers: int = 0
    tokens: int = 0
    most_at_once: int = 0
    wrong_answers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    idle: Footprint | None = None  # before the clients came
    settled: Footprint | None = None  # after a quarter of the time
    end: Footprint | None = None  # with the clients still there
    after: Footprint | None = None  # when they have left
    kv_left_tokens: int = 0

    def first_token_at(self, share: float) -> float:
        """The quantile of the times to first token."""
        ordered = sorted(self.first_token_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    def problems(self) -> list[str]:
        """What must not happen."""
        assert self.idle is not None and self.after is not None
        found = [f"{count} × {error}" for error, count in self.errors.items()]
        if self.wrong_answers:
            found.append(f"{self.wrong_answers} answers differ from the first of their prompt")
        if not self.answers:
            found.append("no answers")
        if self.kv_left_tokens:
            found.append(f"KV of {self.kv_left_tokens} tokens is still in use")
        if self.after.open_files > self.idle.open_files:
            found.append(f"open files: {self.idle.open_files} before, {self.after.open_files} now")
        return found


def expectations(count: int) -> Iterator[GenerateRequest]:
    """Requests of different kinds and lengths, each with a definite answer."""
    for number in range(count):
        options: Options = {"max_tokens": 8 + 8 * (number % 5), "ignore_eos": True}
        if number % 2:
            options |= {"temperature": 0.8, "seed": number}
        else:
            options |= {"temperature": 0.0}
        yield request(f"Citizen {number}: " + "the people want corn. " * (number % 7), **options)


async def answer(stub: GatewayStub, message: GenerateRequest) -> tuple[list[int], str, float]:
    """Token ids, text and seconds until the first token; AssertionError for a broken stream."""
    collector = Collector()
    begin_s = time.perf_counter()
    first_s = None
    async for response in stub.Generate(message):
        if first_s is None and response.WhichOneof("event") == "tokens":
            first_s = time.perf_counter() - begin_s
        collector.add(response)
    (completion,) = collector.completions
    assert completion.finish_reason, "the stream ended without a finish"
    assert completion.generated_tokens == len(completion.token_ids), "tokens were lost or doubled"
    assert first_s is not None
    return completion.token_ids, completion.text, first_s


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[GatewayStub]:
    """A connection of its own: clients are not one process sharing one."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as peer:
        yield GatewayStub(peer)


class Crowd:
    """The clients."""

    def __init__(self, address: str, expected: Sequence[Expected], report: Report) -> None:
        self._address = address
        self._expected = expected
        self._report = report
        self._streaming = 0
        self._until_s = 0.0

    async def run(self, roots: Sequence[int]) -> None:
        """All clients until the time is over; then they leave."""
        report = self._report
        self._until_s = time.monotonic() + report.seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(report.clients):
                tasks.create_task(self._client(number))
            await asyncio.sleep(report.seconds * SETTLE_SHARE)
            report.settled = await asyncio.to_thread(Footprint.of, roots)
            await asyncio.sleep(max(self._until_s - time.monotonic(), 0))
            report.end = await asyncio.to_thread(Footprint.of, roots)

    async def _client(self, number: int) -> None:
        """One answer after the other; each client takes the prompts in an order of its own."""
        async with connection(self._address) as stub:
            step = 0
            while time.monotonic() < self._until_s:
                expected = self._expected[(number + step) % len(self._expected)]
                step += 1
                await self._check(stub, expected)

    async def _check(self, stub: GatewayStub, expected: Expected) -> None:
        report = self._report
        self._streaming += 1
        report.most_at_once = max(report.most_at_once, self._streaming)
        try:
            token_ids, text, first_s = await answer(stub, expected.message)
        except grpc.aio.AioRpcError as error:
            report.errors[f"{error.code().name}: {error.details()}"] += 1
            return
        except AssertionError as error:
            report.errors[str(error)] += 1
            return
        finally:
            self._streaming -= 1
        report.answers += 1
        report.tokens += len(token_ids)
        report.first_token_s.append(first_s)
        report.wrong_answers += (token_ids, text) != (expected.token_ids, expected.text)


async def measure(address: str, roots: Sequence[int], clients: int, seconds: float) -> Report:
    """Let so many clients loose on a running server whose processes descend from `roots`."""
    report = Report(clients, seconds)
    expected = []
    async with connection(address) as stub:
        for message in expectations(min(clients, 40)):
            token_ids, text, _ = await answer(stub, message)
            expected.append(Expected(message, token_ids, text))
    async with AsyncClient(address) as client:
        await client.load()
        report.idle = Footprint.of(roots)
        await Crowd(address, expected, report).run(roots)
        report.after = await _footprint_when_gone(roots, report.idle.open_files)
        report.kv_left_tokens = (await client.load()).kv_used_tokens
    return report


async def _footprint_when_gone(roots: Sequence[int], open_files: int) -> Footprint:
    """Once the server has noticed that the connections are closed; the last look if it never is."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        found = Footprint.of(roots)
        if found.open_files <= open_files or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def describe(report: Report) -> str:
    """A few lines for people."""
    idle, settled, end, after = report.idle, report.settled, report.end, report.after
    assert idle and settled and end and after
    return "\n".join(
        [
            f"{report.clients} clients for {report.seconds:.0f} s, {report.most_at_once} streams"
            f" at once at most: {report.answers} answers, {report.tokens} tokens"
            f" ({report.tokens / report.seconds:.0f}/s)",
            f"time to first token: p50 {report.first_token_at(0.5):.2f} s,"
            f" p99 {report.first_token_at(0.99):.2f} s",
            f"memory (PSS): {idle.pss_bytes / 1e6:.0f} MB before,"
            f" {settled.pss_bytes / 1e6:.0f} after a quarter of the time,"
            f" {end.pss_bytes / 1e6:.0f} at the end, {after.pss_bytes / 1e6:.0f} afterwards",
            f"open files: {idle.open_files} before, {end.open_files} at the end,"
            f" {after.open_files} afterwards",
            f"KV left: {report.kv_left_tokens} tokens",
            *(report.problems() or ["every answer was whole"]),
        ]
    )


def summary(report: Report) -> dict[str, object]:
    """The same for programs."""
    fields = {name: value for name, value in vars(report).items() if name != "first_token_s"}
    footprints = ("idle", "settled", "end", "after")
    return {
        **fields,
        **{name: asdict(fields[name]) for name in footprints},
        "first_token_p50_s": report.first_token_at(0.5),
        "first_token_p99_s": report.first_token_at(0.99),
        "problems": report.problems(),
    }


async def run(model: Path, kv: str, clients: int, seconds: float) -> Report:
    """Start the services, let the clients loose, stop."""
    config = StackConfig(model, options={"gpu-worker": ("--kv", kv)}, show_logs=False)
    async with Stack(config) as stack:
        return await measure(stack.address, list(stack.pids.values()), clients, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--kv", default="512MB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = asyncio.run(run(options.model, options.kv, options.clients, options.seconds))
    print(describe(report))
    if options.json:
        text = json.dumps(summary(report), indent=2)
        options.json.write_text(text + "\n")
    return bool(report.problems())


if __name__ == "__main__":
    raise SystemExit(main())
