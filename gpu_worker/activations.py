"""q, k, v on their way to the CPU worker, attention on its way back.

Where the device's memory is the host's (`cpu` without an emulated link) the kernels work on the
shared slots themselves and nothing is copied.
"""

from typing import Protocol

import numpy as np
import torch

from gpu_worker.link import Link
from gpu_worker.port import AttentionPort

Tensor = torch.Tensor
SLOT_PARTS = ("q", "k", "v", "out", "lse")


def shared_tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """A tensor over a slot's memory; uint16 is how numpy holds BF16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


class SlotTensors:
    """One slot's memory: q (tokens, q heads, dim), k and v (tokens, kv heads, dim) in; out like q
    and lse (tokens, q heads) back."""

    def __init__(self, port: AttentionPort, slot: int) -> None:
        self.q = shared_tensor(port.q(slot))
        self.k = shared_tensor(port.k(slot))
        self.v = shared_tensor(port.v(slot))
        self.out = shared_tensor(port.out(slot))
        self.lse = shared_tensor(port.lse(slot))


class Activations(Protocol):
    """One slot as the device sees it."""

    # The field of StepTimes that the time of `send` belongs to.
    send_counts_as: str

    def inputs(self, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the device writes q, k, v of the slot's first n tokens."""
        ...

    def send(self, n_tokens: int) -> None:
        """To the CPU worker: returns when the slot holds what was written to `inputs`."""
        ...

    def receive(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """out and lse of the slot's first n tokens, on the device."""
        ...


class SharedActivations:
    """The device works on the slot itself."""

    send_counts_as = "device_s"

    def __init__(self, slot: SlotTensors) -> None:
        self._slot = slot

    def inputs(self, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._slot.q[:n_tokens], self._slot.k[:n_tokens], self._slot.v[:n_tokens]

    def send(self, n_tokens: int) -> None:
        """Nothing to do: it is there."""

    def receive(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        return self._slot.out[:n_tokens], self._slot.lse[:n_tokens]


class CopiedActivations:
    """The device has memory of its own; the slot's contents cross the link."""

    def __init__(self, slot: SlotTensors, link: Link, device: torch.device) -> None:
        self._slot = slot
        self._link = link
        # On CUDA `send` is where the host waits for the kernels before it.
        self.send_counts_as = "device_s" if device.type == "cuda" else "idle_link_s"
        self._on_device = {
            name: torch.empty_like(getattr(slot, name), device=device) for name in SLOT_PARTS
        }

    @property
    def n_bytes(self) -> int:
        """Device memory that it takes."""
        return sum(part.nbytes for part in self._on_device.values())

    def inputs(self, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        parts = self._on_device
        return parts["q"][:n_tokens], parts["k"][:n_tokens], parts["v"][:n_tokens]

    def send(self, n_tokens: int) -> None:
        for name in ("q", "k", "v"):
            target = getattr(self._slot, name)[:n_tokens]
            self._link.download(target, self._on_device[name][:n_tokens])

    def receive(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        for name in ("out", "lse"):
            self._link.upload(
                self._on_device[name][:n_tokens], getattr(self._slot, name)[:n_tokens]
            )
        return self._on_device["out"][:n_tokens], self._on_device["lse"][:n_tokens]
