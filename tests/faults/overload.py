"""Ten times more than the system can do: `python -m tests.faults.overload --seconds 120`.

First as many clients as keep it busy, each asking again when it was answered: that is the peak.
Then requests arrive at ten times that rate, whatever became of the ones before. Refused is at once,
and with a time to retry; what is admitted is served as fast as before.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.errors import decode_failure
from protos.transport import channel
from tests.faults.load import Request, requests
from tests.faults.poison import harmless
from tests.faults.rig import Rig

CLIENTS = 64
FACTOR = 10
QUEUE = 64  # requests that may wait
FLAGS = {"gateway": [f"--max-waiting-requests={QUEUE}"]}
WARM_UP_SHARE = 0.2


@dataclass
class Phase:
    """Tokens of finished requests, and refusals, from when it is warm on."""

    begin_s: float
    end_s: float
    goodput_tokens: int = 0
    finished: int = 0
    refused: int = 0
    refusal_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Goodput."""
        return self.goodput_tokens / (self.end_s - self.begin_s)


def _phase(seconds: float) -> Phase:
    now = time.monotonic()
    return Phase(now + WARM_UP_SHARE * seconds, now + seconds)


async def _ask(stub: GatewayStub, request: Request, phase: Phase) -> None:
    begin_s, tokens = time.monotonic(), 0
    try:
        async for event in stub.Generate(request.message()):
            count = len(event.tokens.token_ids)
            # Tokens as they come, so that a phase's edges cut no request off.
            if count and phase.begin_s <= time.monotonic() <= phase.end_s:
                tokens += count
    except grpc.aio.AioRpcError as error:
        failure = decode_failure(error)
        if failure.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            phase.problems.append(f"{failure.code.name}: {failure.message}")
        elif failure.retry_after_s is None:
            phase.problems.append(f"refused without a time to retry: {failure.message}")
        phase.refused += 1
        phase.refusal_s.append(time.monotonic() - begin_s)
        return
    phase.goodput_tokens += tokens
    phase.finished += 1


async def peak(stub: GatewayStub, asked: list[Request], seconds: float) -> Phase:
    """Closed loop: as many clients as saturate it."""
    phase = _phase(seconds)

    async def client(index: int) -> None:
        while time.monotonic() < phase.end_s:
            await _ask(stub, asked[index % len(asked)], phase)
            index += CLIENTS

    await asyncio.gather(*(client(index) for index in range(CLIENTS)))
    return phase


async def overload(stub: GatewayStub, asked: list[Request], seconds: float, per_s: float) -> Phase:
    """Open loop: so many arrivals per second."""
    phase, begin_s = _phase(seconds), time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    for index in range(int(seconds * per_s)):
        await asyncio.sleep(max(0.0, begin_s + index / per_s - time.monotonic()))
        task = asyncio.create_task(_ask(stub, asked[index % len(asked)], phase))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return phase


def p99(values: list[float]) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] if ordered else 0.0


async def run(rig: Rig, peak_seconds: float, seconds: float) -> dict[str, object]:
    """Both phases over a rig that is ready."""
    asked = [harmless(request) for request in requests(CLIENTS, seed=3)]
    async with channel(rig.address) as peer:
        stub = GatewayStub(peer)
        best = await peak(stub, asked, peak_seconds)
        per_s = FACTOR * best.finished / peak_seconds
        under = await overload(stub, asked, seconds, per_s)
    return {
        "peak_tokens_per_s": round(best.tokens_per_s, 1),
        "offered_requests_per_s": round(per_s, 1),
        "overload_tokens_per_s": round(under.tokens_per_s, 1),
        "goodput_share": round(under.tokens_per_s / best.tokens_per_s, 3),
        "finished": under.finished,
        "refused": under.refused,
        "refusal_median_s": round(statistics.median(under.refusal_s or [0.0]), 4),
        "refusal_p99_s": round(p99(under.refusal_s), 4),
        "problems": [*best.problems, *under.problems][:20],
    }


def main() -> int:
    """The full run; exit status 1 when goodput fell below 90 % of the peak or refusals were bad."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--peak-seconds", type=float, default=30.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="moe-lens-overload-") as name,
        Rig(Path(name), flags=FLAGS) as rig,
    ):
        report = asyncio.run(run(rig, options.peak_seconds, options.seconds))
    print(json.dumps(report, indent=2))
    share = report["goodput_share"]
    assert isinstance(share, float)
    return 1 if report["problems"] or share < 0.9 else 0


if __name__ == "__main__":
    sys.exit(main())
