"""Faults at random moments under load: `python -m tests.faults.campaign --faults 300 --seed 1`.

Fault i of a seed is always the same: `--only 17` replays it alone. A fault is survived when every
stream that it met went on with exactly the tokens of the undisturbed run (or ended with UNAVAILABLE
where the gateway itself was ended) and all clients got tokens again.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.transport import channel
from tests.faults.kinds import KINDS, Kind, Scene
from tests.faults.load import Load, reference, requests
from tests.faults.proxy import Proxy
from tests.faults.rig import SERVICES, Rig

LANES = 32
RECOVERY_BOUND_S = 90.0
POLL_S = 0.02
SETTLING_S = 0.5  # until what was on its way has arrived
LONGEST_CALM_S = 1.5


@dataclass
class Result:
    """What one fault did."""

    index: int
    kind: str
    survived: bool
    recovered_s: float | None  # until every client had tokens again, counted from the strike
    pauses_s: list[float]  # for each client, its longest time without a token
    violations: list[str] = field(default_factory=list)


@dataclass
class Report:
    """All faults of a campaign."""

    seed: int
    results: list[Result] = field(default_factory=list)
    streams: int = 0
    elapsed_s: float = 0.0
    leftovers: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Everything survived and nothing left behind."""
        return all(result.survived for result in self.results) and not self.leftovers

    def summary(self) -> dict[str, Any]:
        """Survived and tried by kind, and the pauses that clients saw."""
        by_kind: dict[str, list[Result]] = defaultdict(list)
        for result in self.results:
            by_kind[result.kind].append(result)
        return {
            "seed": self.seed,
            "survived": sum(result.survived for result in self.results),
            "tried": len(self.results),
            "elapsed_s": round(self.elapsed_s, 1),
            "streams": self.streams,
            "pause": _pauses(self.results),
            "by_kind": {name: _line(results) for name, results in sorted(by_kind.items())},
            "leftovers": self.leftovers,
        }


def _line(results: Sequence[Result]) -> dict[str, Any]:
    survived = sum(result.survived for result in results)
    return {"survived": survived, "tried": len(results), **_pauses(results)}


def _pauses(results: Sequence[Result]) -> dict[str, float | None]:
    pauses = sorted(pause for result in results for pause in result.pauses_s)
    if not pauses:
        return {"median_s": None, "p99_s": None}
    p99 = pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
    return {"median_s": round(statistics.median(pauses), 3), "p99_s": round(p99, 3)}


def fault(seed: int, index: int, kinds: Sequence[str]) -> tuple[Kind, random.Random]:
    """The kind and the generator of fault `index`: each kind once before any comes again."""
    turn, place = divmod(index, len(kinds))
    order = random.Random(f"{seed}:{turn}").sample(list(kinds), len(kinds))
    return KINDS[order[place]], random.Random(f"{seed}:{index}")


class Campaign:
    """Strikes one fault after the other while the load runs."""

    def __init__(self, rig: Rig, proxy: Proxy, load: Load) -> None:
        self._rig = rig
        self._proxy = proxy
        self._load = load

    async def strike(self, index: int, kind: Kind, draw: random.Random) -> Result:
        """One fault, from calm to calm."""
        load = self._load
        known = len(load.violations)
        await asyncio.sleep(draw.uniform(0.0, LONGEST_CALM_S))
        begin_s = time.monotonic()
        if kind.ends_gateway:
            load.gateway_away_until_s = float("inf")
        scene = Scene(self._rig, self._proxy, draw)
        await kind.strike(scene)
        recovered = await self._recovered(time.monotonic() + SETTLING_S, scene.doomed)
        end_s = time.monotonic()
        load.gateway_away_until_s = min(load.gateway_away_until_s, end_s)
        pauses = [lane.longest_gap_s(begin_s, end_s) for lane in load.lanes]
        for lane in load.lanes:
            lane.forget_before(end_s - 1.0)
        violations = load.violations[known:]
        if not recovered:
            violations.append(f"not every client had tokens again after {RECOVERY_BOUND_S:.0f} s")
        return Result(
            index,
            kind.name,
            not violations,
            end_s - begin_s if recovered else None,
            pauses,
            violations,
        )

    async def _recovered(self, since_s: float, doomed: Sequence[int]) -> bool:
        """Whether every process is there again, and then every lane gets tokens."""
        deadline_s = since_s + RECOVERY_BOUND_S
        while time.monotonic() < deadline_s:
            present = self._rig.all_pids()
            if any(pid in present for pid in doomed) or not self._complete():
                since_s = time.monotonic()
            elif all(lane.has_token_since(since_s) for lane in self._load.lanes):
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _complete(self) -> bool:
        return all(self._rig.pids(role) for role in SERVICES)


async def run(
    rig: Rig, seed: int, indices: Sequence[int], kinds: Sequence[str], talk: bool = True
) -> Report:
    """Start the services, strike these faults, stop the services."""
    async with Proxy(rig.proxy_path, lambda: rig.socket("gpu-worker")) as proxy:
        # In a thread: the gateway gets ready through the proxy, which this loop serves.
        await asyncio.to_thread(rig.__enter__)
        try:
            async with channel(rig.address) as peer:
                return await _campaign(rig, proxy, GatewayStub(peer), seed, indices, kinds, talk)
        finally:
            await asyncio.to_thread(rig.__exit__)


async def _campaign(
    rig: Rig,
    proxy: Proxy,
    stub: GatewayStub,
    seed: int,
    indices: Sequence[int],
    kinds: Sequence[str],
    talk: bool,
) -> Report:
    report, asked, begin_s = Report(seed), requests(LANES, seed), time.monotonic()
    await _until_ready(stub)
    load = Load(stub, asked, await reference(stub, asked))
    campaign = Campaign(rig, proxy, load)
    async with load.running():
        for index in indices:
            kind, draw = fault(seed, index, kinds)
            result = await campaign.strike(index, kind, draw)
            report.results.append(result)
            if talk:
                _tell(result)
    report.streams = sum(lane.streams for lane in load.lanes)
    # What came after the last fault was judged.
    judged = sum(len(result.violations) for result in report.results)
    report.leftovers = [*load.violations[judged:], *await _leftovers(stub, rig)]
    report.elapsed_s = time.monotonic() - begin_s
    return report


async def _until_ready(stub: GatewayStub) -> None:
    async with asyncio.timeout(60):
        await stub.GetLoad(messages.GetLoadRequest(), wait_for_ready=True)


async def _leftovers(stub: GatewayStub, rig: Rig) -> list[str]:
    """What an idle system must not hold."""
    load = await stub.GetLoad(messages.GetLoadRequest(), timeout=10)
    found = []
    if load.kv_used_tokens or load.running or load.waiting:
        found.append(f"idle, but {load.running} run and {load.kv_used_tokens} KV tokens are held")
    if rig.owns_shm and (files := [path.name for path in rig.shm_dir.iterdir()]):
        found.append(f"shared memory still has names: {files}")
    return found


def _tell(result: Result) -> None:
    verdict = "survived" if result.survived else "LOST"
    pause = max(result.pauses_s, default=0.0)
    print(f"{result.index:4d}  {result.kind:24s}  {verdict}  pause {pause:6.2f} s", flush=True)
    for violation in result.violations[:5]:
        print(f"      {violation}", flush=True)


def main() -> int:
    """The named command of the full run; exit status 1 when a fault was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="replay these faults alone")
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--keep-log", type=Path, help="copy what the services said here")
    options = parser.parse_args()
    indices = options.only if options.only is not None else range(options.faults)
    with tempfile.TemporaryDirectory(prefix="moe-lens-faults-") as directory:
        rig = Rig(Path(directory), proxied=True)
        try:
            report = asyncio.run(run(rig, options.seed, indices, options.kinds))
        finally:
            if options.keep_log is not None:
                options.keep_log.write_bytes(rig.log.read_bytes())
    print(json.dumps(report.summary(), indent=2))
    if options.json is not None:
        faults = [asdict(result) for result in report.results]
        options.json.write_text(json.dumps({**report.summary(), "faults": faults}, indent=1))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
