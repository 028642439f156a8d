"""Many streaming clients for a short time; bench/clients.py does the same with 500 for minutes."""

import asyncio
from pathlib import Path

from bench.clients import Footprint, Report, run

CLIENTS, SECONDS = 60, 8.0
# Per-connection buffers and the allocators' reserves; a leak of every answer would be more.
MOST_GROWTH_BYTES = 64e6


def test_answers_stay_whole_and_nothing_is_left(demo_model: Path) -> None:
    report = asyncio.run(run(demo_model, "64MB", CLIENTS, SECONDS))
    assert report.problems() == []
    assert report.most_at_once == CLIENTS
    assert report.answers >= CLIENTS
    assert report.settled is not None and report.end is not None
    assert report.end.pss_bytes - report.settled.pss_bytes < MOST_GROWTH_BYTES


def test_what_went_wrong_is_said() -> None:
    report = Report(clients=2, seconds=1.0, answers=3, wrong_answers=1, kv_left_tokens=16)
    report.errors["UNAVAILABLE: gone"] += 2
    report.idle, report.after = Footprint(1, 10), Footprint(1, 11)
    assert report.problems() == [
        "2 × UNAVAILABLE: gone",
        "1 answers differ from the first of their prompt",
        "KV of 16 tokens is still in use",
        "open files: 10 before, 11 now",
    ]
