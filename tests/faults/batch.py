"""A batch that faults disturb until it is done: `python -m tests.faults.batch --rows 2000`.

The gateway keeps the batch. Every few seconds a fault strikes; afterwards each row has exactly one
record, and it says what the undisturbed run says.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from moelens.v1 import gateway_pb2 as messages
from moelens.v1.gateway_pb2_grpc import GatewayStub

from protos.transport import channel
from tests.faults.campaign import fault
from tests.faults.kinds import Scene
from tests.faults.proxy import Proxy
from tests.faults.rig import Rig

PERIOD_S = 5.0
BOUND_S = 3600.0
KINDS = [
    "delay gpu-worker",
    "foreign configure",
    "full shm",
    "hang attention",
    "kill attention",
    "kill cpu-worker",
    "kill gateway",
    "kill gpu-worker",
    "kill planner",
    "message cut",
    "message flip",
]
ENDED = (
    messages.BATCH_STATE_COMPLETED,
    messages.BATCH_STATE_FAILED,
    messages.BATCH_STATE_CANCELLED,
)


def rows(count: int, seed: int, longest: int = 48) -> list[dict[str, Any]]:
    """Mixed lengths; every tenth row is faulty."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        body: dict[str, Any] = {
            "prompt": [draw.randrange(3, 4000) for _ in range(draw.randint(1, longest))],
            "max_tokens": draw.randint(1, longest),
            "temperature": draw.choice([0.0, 0.8]),
            "seed": draw.getrandbits(30),
            "logit_bias": {"4000": -100},
        }
        if i % 10 == 9:
            body["max_tokens"] = 0
        made.append({"custom_id": f"row-{i}", "url": "/v1/completions", "body": body})
    return made


@dataclass
class BatchReport:
    """What became of the rows."""

    rows: int
    faults: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0
    problems: list[str] = field(default_factory=list)


async def submit(stub: GatewayStub, name: str, data: bytes) -> None:
    """Hand a batch in."""

    async def pieces() -> AsyncIterator[messages.SubmitBatchRequest]:
        for at in range(0, len(data), 1 << 18):
            batch_id = name if at == 0 else ""
            yield messages.SubmitBatchRequest(batch_id=batch_id, jsonl=data[at : at + (1 << 18)])

    await stub.SubmitBatch(pieces())


async def until_ended(stub: GatewayStub, name: str) -> messages.BatchProgress:
    """Ask until the batch has ended, also while the gateway is away."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        try:
            answer = await stub.GetBatch(messages.GetBatchRequest(batch_id=name), timeout=5)
            if answer.progress.state in ENDED:
                return answer.progress
        except grpc.aio.AioRpcError as error:
            if error.code() not in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ):
                raise
        await asyncio.sleep(0.2)
    raise TimeoutError(f"batch {name} has not ended")


def outcomes(rig: Rig, name: str) -> list[tuple[str, str]]:
    """(custom_id, what was answered) of every record, in the order of the ids."""
    found = []
    for line in (rig.batch_dir / name / "output.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["error"] is not None:
            said: Any = record["error"]["message"]
        else:
            body = record["response"]["body"]
            said = [body["choices"], body["usage"]]
        found.append((record["custom_id"], json.dumps(said, sort_keys=True)))
    return sorted(found)


async def disturbed(rig: Rig, count: int, seed: int, period_s: float = PERIOD_S) -> BatchReport:
    """Start the services, run the batch in peace, then once more with faults; compare."""
    report = BatchReport(count)
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows(count, seed))
    async with Proxy(rig.proxy_path, lambda: rig.socket("gpu-worker")) as proxy:
        await asyncio.to_thread(rig.__enter__)
        try:
            async with channel(rig.address) as peer:
                stub = GatewayStub(peer)
                await submit(stub, "calm", data)
                await until_ended(stub, "calm")
                begin_s = time.monotonic()
                await submit(stub, "storm", data)
                striking = asyncio.create_task(_strike(rig, proxy, seed, period_s, report.faults))
                try:
                    progress = await until_ended(stub, "storm")
                finally:
                    striking.cancel()
                report.elapsed_s = time.monotonic() - begin_s
                if progress.state != messages.BATCH_STATE_COMPLETED:
                    report.problems.append(f"the batch ended otherwise: {progress}")
                report.problems += _differences(outcomes(rig, "calm"), outcomes(rig, "storm"))
        finally:
            await asyncio.to_thread(rig.__exit__)
    return report


async def _strike(rig: Rig, proxy: Proxy, seed: int, period_s: float, faults: list[str]) -> None:
    index = 0
    while True:
        await asyncio.sleep(period_s)
        kind, draw = fault(seed, index, KINDS)
        index += 1
        try:
            await kind.strike(Scene(rig, proxy, draw))
            faults.append(kind.name)
        except (AssertionError, OSError) as error:
            # Its victim is being replaced at this moment.
            faults.append(f"{kind.name}: not possible now ({error})")


def _differences(calm: Sequence[tuple[str, str]], storm: Sequence[tuple[str, str]]) -> list[str]:
    """Rows doubled, missing or answered otherwise."""
    problems = []
    for name, found in (("calm", calm), ("storm", storm)):
        ids = [custom_id for custom_id, _ in found]
        if len(ids) != len(set(ids)):
            problems.append(f"{name}: {len(ids) - len(set(ids))} rows have two records")
    expected, got = dict(calm), dict(storm)
    missing = expected.keys() - got.keys()
    if missing:
        problems.append(f"{len(missing)} rows have no record, for example {min(missing)}")
    other = [i for i in expected if i in got and got[i] != expected[i]]
    if other:
        problems.append(f"{len(other)} rows differ, for example {other[0]}: {got[other[0]]}")
    return problems


def main() -> int:
    """The full run; exit status 1 when a row was lost, doubled or changed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--period-s", type=float, default=PERIOD_S)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-lens-storm-") as name:
        rig = Rig(Path(name), proxied=True)
        report = asyncio.run(disturbed(rig, options.rows, options.seed, options.period_s))
    print(json.dumps(vars(report), indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
