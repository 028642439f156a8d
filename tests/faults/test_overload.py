"""A short overload; `python -m tests.faults.overload` measures goodput over two minutes."""

import asyncio

from tests.faults.overload import run
from tests.faults.rig import Rig


def test_ten_times_too_much_is_refused_at_once_and_the_rest_is_served(rig: Rig) -> None:
    report = asyncio.run(run(rig, peak_seconds=2.0, seconds=3.0))
    assert not report["problems"]
    assert report["refused"] > report["finished"] > 0
