"""The link between host and device: large packets one after the other, small copies in between.

A packet is on its way alone, so that a small copy (activations) waits for one packet at most. The
emulated link really copies, and paces the copies to a rate, each direction for itself.
"""

import threading
import time
from typing import Protocol

import torch

from native.host_memory import EmulatedLink as PacedCopy

Tensor = torch.Tensor


class Link(Protocol):
    """Copies between host memory and a device's."""

    def send_packet(self, to: Tensor, source: Tensor, ready_ns: int) -> float:
        """A large copy to the device (uint8); returns when it has arrived: seconds on the link.

        `ready_ns` (time.monotonic_ns) is since when it could have been sent. For one thread.
        """
        ...

    def upload(self, to: Tensor, source: Tensor) -> None:
        """A small copy to the device; what the device does afterwards sees it."""
        ...

    def download(self, to: Tensor, source: Tensor) -> None:
        """A small copy to the host; returns when it has arrived."""
        ...


class Lane:
    """One direction of an emulated link: one copy at a time, urgent ones before the next packet."""

    def __init__(self, bytes_per_s: float) -> None:
        self._paced = PacedCopy(bytes_per_s)
        self._turn = threading.Condition()
        self._busy = False
        self._urgent_waiting = 0

    def copy(self, to: Tensor, source: Tensor, ready_ns: int, urgent: bool) -> float:
        """Returns when the last byte has arrived: seconds on the link."""
        self._take_turn(urgent)
        try:
            return self._paced.copy(_bytes(to), _bytes(source), ready_ns=ready_ns)
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _take_turn(self, urgent: bool) -> None:
        with self._turn:
            self._urgent_waiting += urgent
            self._turn.wait_for(lambda: not self._busy and (urgent or not self._urgent_waiting))
            self._urgent_waiting -= urgent
            self._busy = True


class EmulatedLink:
    """Host memory stands for the device's; both directions have the same rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._to_device = Lane(bytes_per_s)
        self._to_host = Lane(bytes_per_s)

    def send_packet(self, to: Tensor, source: Tensor, ready_ns: int) -> float:
        return self._to_device.copy(to, source, ready_ns, urgent=False)

    def upload(self, to: Tensor, source: Tensor) -> None:
        self._to_device.copy(to, source, time.monotonic_ns(), urgent=True)

    def download(self, to: Tensor, source: Tensor) -> None:
        self._to_host.copy(to, source, time.monotonic_ns(), urgent=True)


class CudaLink:
    """The device's copy engines; packets have a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._packets = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send_packet(self, to: Tensor, source: Tensor, ready_ns: int) -> float:
        begin_s = time.perf_counter()
        with torch.cuda.stream(self._packets):
            to.copy_(source, non_blocking=True)
        self._packets.synchronize()
        return time.perf_counter() - begin_s

    def upload(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def download(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)
        torch.cuda.current_stream(source.device).synchronize()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
