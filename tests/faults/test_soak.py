"""A short soak; `python -m tests.faults.soak` is the long one."""

import asyncio

from tests.faults.load import requests
from tests.faults.poison import harmless
from tests.faults.rig import Rig
from tests.faults.soak import LANES, soak

SECONDS = 6.0


def test_full_load_with_departures_and_malformed_requests_leaves_nothing_behind(rig: Rig) -> None:
    asked = [harmless(request) for request in requests(LANES, seed=2)]
    report = asyncio.run(soak(rig, SECONDS, asked=asked))
    # So short a run still fills caches: memory is the long run's business.
    problems = [problem for problem in report.problems if "rss_bytes" not in problem]
    assert not problems, problems
    assert min(report.streams, report.refusals, report.departures) > 0
