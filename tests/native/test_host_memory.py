"""Read bandwidth and the emulated link's copies."""

from __future__ import annotations

import time

import numpy as np
import pytest

from native.errors import InvalidArgumentError
from native.host_memory import EmulatedLink, read_bandwidth_bytes_per_s
from native.threads import ThreadPool


def test_read_bandwidth_is_that_of_some_memory() -> None:
    with ThreadPool(2) as pool:
        rate = read_bandwidth_bytes_per_s(size_bytes=1 << 26, repeats=3, pool=pool)
    assert 1e8 < rate < 1e12


@pytest.mark.parametrize("bytes_per_s", [0, 1e9])
@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 4097, 3_000_001])
@pytest.mark.parametrize("shift", [0, 5])
def test_every_byte_arrives_and_no_other_is_touched(
    bytes_per_s: float, size_bytes: int, shift: int
) -> None:
    source = np.random.default_rng(0).integers(0, 256, size_bytes + 2, dtype=np.uint8)
    to = np.full(size_bytes + 64, 0xAA, np.uint8)
    link = EmulatedLink(bytes_per_s, piece_bytes=1000)
    link.copy(to[shift : shift + size_bytes], source[1 : 1 + size_bytes])
    assert np.array_equal(to[shift : shift + size_bytes], source[1 : 1 + size_bytes])
    assert (to[:shift] == 0xAA).all() and (to[shift + size_bytes :] == 0xAA).all()


def test_a_copy_takes_the_time_the_link_would_and_little_of_the_processor() -> None:
    data = np.ones(50_000_000, np.uint8)
    to = np.zeros_like(data)
    start_s, cpu_s = time.monotonic(), time.process_time()
    seconds = EmulatedLink(2e8).copy(to, data)
    assert seconds >= 0.25 - 1e-6
    assert time.monotonic() - start_s >= 0.25
    assert time.process_time() - cpu_s < 0.1


def test_packets_that_were_ready_follow_without_a_pause() -> None:
    link, data = EmulatedLink(1e9), np.ones(1_000_000, np.uint8)
    start_ns = time.monotonic_ns()
    seconds = [link.copy(data, data.copy(), ready_ns=start_ns) for _ in range(20)]
    assert sum(seconds) == pytest.approx((link.free_at_ns - start_ns) * 1e-9)
    assert link.free_at_ns - start_ns >= 20e6 - 20


def test_a_packet_does_not_start_before_it_is_ready() -> None:
    link, data = EmulatedLink(1e9), np.ones(1_000_000, np.uint8)
    link.copy(data, data.copy())
    time.sleep(0.02)
    before_ns = time.monotonic_ns()
    link.copy(data, data.copy())
    assert link.free_at_ns - before_ns >= 1_000_000


def test_a_link_faster_than_memory_reports_the_time_the_copy_took() -> None:
    data, link = np.ones(50_000_000, np.uint8), EmulatedLink(1e15)
    start_ns = time.monotonic_ns()
    seconds = link.copy(np.zeros_like(data), data)
    assert seconds > 50e6 / 1e12
    assert start_ns < link.free_at_ns <= time.monotonic_ns()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="bytes_per_s"):
        EmulatedLink(-1)
    with pytest.raises(InvalidArgumentError, match="bytes_per_s"):
        EmulatedLink(float("nan"))
    with pytest.raises(InvalidArgumentError, match="piece_bytes"):
        EmulatedLink(1e9, piece_bytes=0)
    with pytest.raises(InvalidArgumentError, match="to: must be 10 bytes"):
        EmulatedLink(0).copy(np.zeros(9, np.uint8), np.zeros(10, np.uint8))
    with pytest.raises(InvalidArgumentError, match="size_bytes, repeats"):
        read_bandwidth_bytes_per_s(size_bytes=0)
