"""Configuration of the CPU worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from native.segment import MAX_PROCESSES

DEFAULT_SHM_DIR = Path("/dev/shm")


@dataclass(frozen=True)
class CpuWorkerConfig:
    """What is fixed for the life of the process. Raises ValueError naming the wrong field."""

    shm_dir: Path = DEFAULT_SHM_DIR
    attention_processes: int | None = None  # None: as many as there are cores
    pin: bool = True  # each to a core of its own, where there are enough
    huge_pages: bool = True  # where the kernel allows them for shared memory
    spin_s: float | None = None  # before an idle attention process sleeps; None: chosen
    hung_after_s: float = 5.0  # default of ConfigureRequest.peer_timeout_s
    start_timeout_s: float = 60.0  # for the attention processes to be ready

    def __post_init__(self) -> None:
        if not self.shm_dir.is_dir():
            raise ValueError(f"shm_dir: {self.shm_dir} is not a directory")
        n = self.attention_processes
        if n is not None and not 1 <= n <= MAX_PROCESSES:
            raise ValueError(f"attention_processes: {n} is not between 1 and {MAX_PROCESSES}")
        if self.spin_s is not None and not 0 <= self.spin_s <= 1:
            raise ValueError(f"spin_s: {self.spin_s} is not between 0 and 1 s")
        for name in ("hung_after_s", "start_timeout_s"):
            if not 0.1 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name}: {getattr(self, name)} is not between 0.1 and 3600 s")
