"""Full load for a long time: `python -m tests.faults.soak --seconds 1200`.

32 clients compare every token; others leave in the middle, and others send what is refused. What
each process holds is sampled all the time: it may not grow.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.transport import channel
from tests.faults.load import Load, Request, reference, requests
from tests.faults.rig import ATTENTION, SERVICES, Rig

LANES = 32
LEAVERS = 4
SAMPLE_S = 0.5
# Of the run: until caches and heaps have their size.
WARM_UP_SHARE = 1 / 3
GROWTH_BOUND = 0.02
# Heaps of so little are noise.
NOISE_BYTES = 1 << 20


@dataclass(frozen=True)
class Holdings:
    """What all processes of one role hold together."""

    rss_bytes: int
    descriptors: int
    threads: int


def holdings(pids: Sequence[int]) -> Holdings:
    """Of living processes."""
    rss_bytes = descriptors = threads = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        # Shared memory is counted on its own.
        private = values["VmRSS"].split()[0], values["RssShmem"].split()[0]
        rss_bytes += (int(private[0]) - int(private[1])) * 1024
        threads += int(values["Threads"])
        descriptors += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Holdings(rss_bytes, descriptors, threads)


def shm_bytes(rig: Rig) -> int:
    """Shared memory of the rig's file system, files without a name included."""
    status = os.statvfs(rig.shm_dir)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@dataclass
class SoakReport:
    """Growth of every series: the median of the last third against that of the one before."""

    seconds: float
    streams: int = 0
    refusals: int = 0
    departures: int = 0
    growth: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Sampler:
    """Series by name, one value for each look."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.series: dict[str, list[float]] = {}

    async def run(self) -> None:
        """Look now and then."""
        while True:
            self._look()
            await asyncio.sleep(SAMPLE_S)

    def _look(self) -> None:
        for role in (*SERVICES, ATTENTION):
            for name, value in vars(holdings(self._rig.pids(role))).items():
                self.series.setdefault(f"{role} {name}", []).append(value)
        if self._rig.owns_shm:
            self.series.setdefault("shm_bytes", []).append(shm_bytes(self._rig))

    def growth(self) -> tuple[dict[str, float], list[str]]:
        """Relative growth of each series, and those that grew too much."""
        found, problems = {}, []
        for name, values in self.series.items():
            steady = values[int(len(values) * WARM_UP_SHARE) :]
            half = len(steady) // 2
            before, after = statistics.median(steady[:half]), statistics.median(steady[half:])
            found[name] = (after - before) / before if before else after
            noise = NOISE_BYTES if name.endswith("bytes") else 1
            if after - before > max(GROWTH_BOUND * before, noise):
                problems.append(f"{name} grew from {before:.0f} to {after:.0f}")
        return found, problems


def malformed(draw: random.Random) -> messages.GenerateRequest:
    """A request that is refused, for one reason or another."""
    request = messages.GenerateRequest(text="To be", max_tokens=4)
    spoil: list[Callable[[], Any]] = [
        lambda: request.ClearField("prompt"),
        lambda: request.token_ids.ids.append(10**6),
        lambda: setattr(request.sampling, "temperature", float("nan")),
        lambda: setattr(request, "max_tokens", 0),
        lambda: setattr(request, "model", "another"),
        lambda: request.stop.append(""),
        lambda: setattr(request, "text", "word " * 200_000),
        lambda: setattr(request.sampling, "top_p", 7.0),
    ]
    draw.choice(spoil)()
    return request


async def soak(
    rig: Rig, seconds: float, seed: int = 1, asked: Sequence[Request] | None = None
) -> SoakReport:
    """Run it over a rig that is ready."""
    report, draw = SoakReport(seconds), random.Random(seed)
    asked = asked or requests(LANES, seed)
    async with channel(rig.address) as peer:
        stub = GatewayStub(peer)
        load = Load(stub, asked, await reference(stub, asked))
        sampler = Sampler(rig)
        until_s = time.monotonic() + seconds
        async with load.running():
            beside = [_leave(stub, until_s, random.Random(i), report) for i in range(LEAVERS)]
            watch = asyncio.create_task(sampler.run())
            await asyncio.gather(_annoy(stub, until_s, draw, report), *beside)
            watch.cancel()
        report.streams = sum(lane.streams for lane in load.lanes)
        report.growth, report.problems = sampler.growth()
        report.problems += load.violations
        await asyncio.sleep(0.5)
        final = await stub.GetLoad(messages.GetLoadRequest())
        if final.kv_used_tokens or final.running or final.waiting:
            report.problems.append(f"idle, but {final.kv_used_tokens} KV tokens are held")
    return report


async def _annoy(
    stub: GatewayStub, until_s: float, draw: random.Random, report: SoakReport
) -> None:
    while time.monotonic() < until_s:
        try:
            async for _ in stub.Generate(malformed(draw)):
                pass
            report.problems.append("a malformed request was served")
        except grpc.aio.AioRpcError as error:
            report.refusals += 1
            if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                report.problems.append(f"{error.code().name}: {error.details()}")
        await asyncio.sleep(0.05)


async def _leave(
    stub: GatewayStub, until_s: float, draw: random.Random, report: SoakReport
) -> None:
    """Ask for much and leave in the middle of it, in one way or another."""
    while time.monotonic() < until_s:
        request = messages.GenerateRequest(text="The king", max_tokens=1000)
        request.sampling.ignore_eos = True
        by_deadline = draw.random() < 0.3
        call = stub.Generate(request, timeout=draw.uniform(0.05, 1.0) if by_deadline else None)
        try:
            for _ in range(draw.randint(1, 60)):
                await call.read()
        except grpc.aio.AioRpcError:
            pass
        call.cancel()
        report.departures += 1
        await asyncio.sleep(draw.uniform(0.0, 0.1))


def main() -> int:
    """The full run; exit status 1 when something grew or went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-lens-soak-") as name, Rig(Path(name)) as rig:
        report = asyncio.run(soak(rig, options.seconds, options.seed))
    print(json.dumps(vars(report), indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
