"""A part of `python -m tests.faults.campaign`, which strikes 300 faults."""

import asyncio
from pathlib import Path

from tests.faults.campaign import fault, run
from tests.faults.kinds import KINDS
from tests.faults.rig import Rig

KINDS_HERE = [
    "clock jump",
    "full shm",
    "intruding session",
    "kill attention",
    "kill gateway",
    "kill gpu-worker",
    "message garbage",
]


def test_every_stream_survives_faults_of_many_kinds_with_its_own_tokens(tmp_path: Path) -> None:
    rig = Rig(tmp_path, proxied=True)
    report = asyncio.run(run(rig, 1, range(len(KINDS_HERE)), KINDS_HERE))
    assert report.passed, report.summary()
    assert len(report.results) == len(KINDS_HERE)


def test_faults_are_the_same_for_the_same_seed() -> None:
    kinds = sorted(KINDS)
    first, second = (
        [(kind.name, draw.random()) for kind, draw in (fault(7, i, kinds) for i in range(60))]
        for _ in range(2)
    )
    assert first == second
    assert {name for name, _ in first} == set(kinds)
