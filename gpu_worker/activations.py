"""q, k, v on their way to the CPU worker, attention on its way back.

Where the device's memory is the host's (`cpu` without an emulated link) the kernels work on the
shared slots themselves and nothing is copied.
"""

from typing import Protocol

import numpy as np
import torch

from gpu_worker.port import AttentionPort

Tensor = torch.Tensor


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

    def inputs(self, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the device writes q, k, v of the slot's first n tokens."""
        ...

    def send(self, n_tokens: int) -> None:
        """Returns when the slot holds what was written to `inputs`."""
        ...

    def receive(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """out and lse of the slot's first n tokens, on the device."""
        ...


class SharedActivations:
    """The device works on the slot itself."""

    def __init__(self, slot: SlotTensors) -> None:
        self._slot = slot

    def inputs(self, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._slot.q[:n_tokens], self._slot.k[:n_tokens], self._slot.v[:n_tokens]

    def send(self, n_tokens: int) -> None:
        """Nothing to do: it is there."""

    def receive(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        return self._slot.out[:n_tokens], self._slot.lse[:n_tokens]
