"""What measurements have in common: how much effort, over which counts, and what is reported."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.fit import LinearFit


@dataclass(frozen=True)
class Effort:
    """How long a measurement may take and how much of it there is."""

    name: str
    repeats: int
    ladder_factor: int  # from one count to the next
    point_s: float  # for one point, beyond the first sample
    link_passes: int  # over all streamed weights
    read_bytes: int
    download_bytes: int

    def ladder(self, first: int, last: int) -> list[int]:
        """first, a factor more, …, and last."""
        counts = []
        while first < last:
            counts.append(first)
            first *= self.ladder_factor
        return [*counts, last]

    def median_s(self, work: Callable[[], object]) -> float:
        """Median seconds of a piece of work, after one that warms up."""
        times_s = []
        for _ in range(self.repeats + 1):
            begin_s = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - begin_s)
        return statistics.median(times_s[1:])


THOROUGH = Effort("profile", 5, 2, 2.0, 3, 1 << 29, 1 << 26)
# At a worker's start, when it was given no profile.
QUICK = Effort("short measurement at the start", 2, 8, 0.05, 0, 1 << 27, 1 << 21)


@dataclass(frozen=True)
class Measured:
    """Values of HardwareSpec with what is to be said of each."""

    values: dict[str, float]
    source: str
    # Points behind device_time_*: (tokens, seconds of a layer).
    device_time: tuple[tuple[float, float], ...] = ()


def quality(what: str, line: LinearFit) -> str:
    """How well a line fits, in words."""
    return f"{what}; line fits within {line.mean_error:.1%} on average, {line.worst_error:.1%}"
