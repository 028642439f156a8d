"""The data mover, the link it uses, and what stays resident."""

import threading
import time

import pytest
import torch

from gpu_worker.errors import MemoryShortage
from gpu_worker.link import EmulatedLink
from gpu_worker.residency import choose, choose_for_memory


def bytes_of(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


def test_the_emulated_link_copies_at_its_rate() -> None:
    link = EmulatedLink(50e6)
    source, target = bytes_of(5_000_000), torch.zeros(5_000_000, dtype=torch.uint8)
    begin_s = time.perf_counter()
    link.send_packet(target, source, time.monotonic_ns())
    elapsed_s = time.perf_counter() - begin_s
    assert torch.equal(target, source)
    # Exact from below; from above the machine may be busy with other things.
    assert 0.0999 <= elapsed_s < 0.5


def test_the_link_carries_both_directions_at_once() -> None:
    link = EmulatedLink(20e6)
    packet, small = bytes_of(4_000_000), bytes_of(64)
    sender = threading.Thread(
        target=link.send_packet, args=(torch.empty_like(packet), packet, 0), daemon=True
    )
    sender.start()
    time.sleep(0.02)
    begin_s = time.perf_counter()
    target = torch.zeros_like(small)
    link.download(target, small)
    elapsed_s = time.perf_counter() - begin_s
    assert sender.is_alive()
    assert elapsed_s < 0.1
    assert torch.equal(target, small)
    sender.join()


def test_a_small_copy_waits_for_one_packet_at_most() -> None:
    link = EmulatedLink(100e6)
    packet = bytes_of(5_000_000)  # 50 ms
    sent: list[int] = []

    def send() -> None:
        for i in range(6):
            link.send_packet(torch.empty_like(packet), packet, time.monotonic_ns())
            sent.append(i)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    time.sleep(0.06)
    before = len(sent)
    small = bytes_of(64_000).view(torch.float32)
    target = torch.empty_like(small)
    link.upload(target, small)
    assert len(sent) <= before + 1
    assert torch.equal(target.view(torch.uint8), small.view(torch.uint8))
    sender.join()


@pytest.mark.parametrize(
    ("budget", "streamed"),
    [
        (0, (0, 1, 2, 3, 4, 5, 6, 7)),
        (99, (0, 1, 2, 3, 4, 5, 6, 7)),
        (400, (0, 2, 4, 6)),
        (699, (0, 4)),
        (799, (0,)),
        (800, ()),
    ],
)
def test_resident_stages_fit_the_budget_and_lie_evenly(
    budget: int, streamed: tuple[int, ...]
) -> None:
    found = choose([100] * 8, budget)
    assert found.streamed == streamed
    assert found.resident_bytes == 100 * (8 - len(streamed)) <= max(budget, 0)
    assert found.streamed_bytes == 100 * len(streamed)
    assert found.resident_share == (8 - len(streamed)) / 8


def test_device_memory_holds_the_buffers_too() -> None:
    fixed = [("base", 50)]
    assert choose_for_memory([100] * 8, fixed, 850).streamed == ()
    half = choose_for_memory([100] * 8, fixed, 650)
    assert half.resident_bytes + 2 * half.buffer_bytes + 50 <= 650
    assert half.streamed == (0, 2, 4, 6)
    with pytest.raises(MemoryShortage, match=r"base[\s\S]*two stages' weights"):
        choose_for_memory([100] * 8, fixed, 249)
