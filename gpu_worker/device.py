"""What computes: its memory, its link to the host, and when it is done with something."""

from collections.abc import Callable
from typing import Protocol

import torch

from gpu_worker import memory
from gpu_worker.link import CudaLink, EmulatedLink, Link
from gpu_worker.ops import Ops

Tensor = torch.Tensor
# Waits until the device has finished what it was given before the fence was made.
Fence = Callable[[], None]
# Left to CUDA's libraries and to torch's allocator, which rounds up.
WORKSPACE_BYTES = 1_000_000_000


class Device(Protocol):
    """A device and the operations on it. `link` is None where it computes in host memory."""

    name: str
    ops: Ops
    link: Link | None

    def allocate(self, n_bytes: int) -> Tensor:
        """Device memory (uint8)."""
        ...

    def free_bytes(self) -> int:
        """Device memory that weights and activations may take."""
        ...

    def fence(self) -> Fence: ...

    def register(self, address: int, n_bytes: int) -> None:
        """Let the device copy from and to this host memory directly (pinned)."""
        ...


class CpuDevice:
    """The CPU's cores. With `link` its memory counts as a device's, apart from the host's."""

    name = "cpu"

    def __init__(
        self, ops: Ops, link: EmulatedLink | None = None, memory_bytes: int | None = None
    ) -> None:
        self.ops = ops
        self.link: Link | None = link
        self._memory_bytes = memory_bytes

    def allocate(self, n_bytes: int) -> Tensor:
        return memory.allocate(n_bytes)[:n_bytes]

    def free_bytes(self) -> int:
        available = memory.available_bytes()
        return available if self._memory_bytes is None else min(self._memory_bytes, available)

    def fence(self) -> Fence:
        """Operations are done when they return."""
        return _nothing_to_wait_for

    def register(self, address: int, n_bytes: int) -> None:
        """It is the CPU's own memory."""


class CudaDevice:
    """A CUDA device; work is queued on its current stream."""

    name = "cuda"

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.link: Link | None = CudaLink(ops.device)

    def allocate(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.ops.device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.ops.device)
        return max(0, int(free) - WORKSPACE_BYTES)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.ops.device))
        return event.synchronize

    def register(self, address: int, n_bytes: int) -> None:
        """MemoryError with the limit to raise where the kernel refuses to lock the pages."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, n_bytes, 0)
        if int(status) != 0:
            raise MemoryError(
                f"cannot pin {n_bytes / 1e9:.3f} GB of host memory (CUDA error {int(status)}); "
                "raise the memlock limit (ulimit -l)"
            )


def _nothing_to_wait_for() -> None:
    pass
