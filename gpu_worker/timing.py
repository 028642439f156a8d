"""Where a step's time goes, measured where it is spent; and, when asked for, a timeline of it."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_worker.port import JobTimes


@dataclass
class StepTimes:
    """Seconds of one step by what they were spent on; see StepTimes in gpu_worker.proto."""

    total_s: float = 0.0
    device_s: float = 0.0
    attention_s: float = 0.0
    link_s: float = 0.0
    sampling_s: float = 0.0
    idle_link_s: float = 0.0
    idle_attention_s: float = 0.0
    wait_for_plan_s: float = 0.0
    kv_read_bytes: int = 0
    weights_streamed_bytes: int = 0
    gemm_s: float = 0.0
    routing_s: float = 0.0

    @property
    def idle_other_s(self) -> float:
        """What the other parts leave of the total."""
        known_s = self.device_s + self.sampling_s + self.idle_link_s + self.idle_attention_s
        return max(0.0, self.total_s - known_s)


@dataclass
class OpTimes:
    """Seconds of a device's operations by kind, since it was made; all 0 where it cannot tell."""

    gemm_s: float = 0.0
    routing_s: float = 0.0


@dataclass(frozen=True)
class Span:
    """An interval of one row of the timeline; seconds of time.monotonic, which on Linux is also
    time.perf_counter and the clock of the attention processes."""

    row: str
    name: str
    begin_s: float
    end_s: float


@dataclass
class Timeline:
    """Spans in memory, written as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

    spans: list[Span] = field(default_factory=list)

    def add(self, row: str, name: str, begin_s: float, end_s: float) -> None:
        """Record an interval."""
        self.spans.append(Span(row, name, begin_s, end_s))

    def save(self, path: Path) -> None:
        """Write all spans as JSON, a thread for each row, by name; times as they were measured, so
        that others of this machine can add theirs."""
        rows = sorted({span.row for span in self.spans})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": row}}
            for i, row in enumerate(rows)
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": 1,
                "tid": rows.index(span.row),
                "ts": span.begin_s * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6,
            }
            for span in self.spans
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


class StepClock:
    """Adds up a step's times; with a timeline it also keeps every interval."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.times = StepTimes()
        self._timeline = timeline
        self._begin_s = time.perf_counter()

    @contextlib.contextmanager
    def measure(self, part: str, name: str, row: str = "device") -> Iterator[None]:
        """Count the block's duration as `part`, a field of StepTimes."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            setattr(self.times, part, getattr(self.times, part) + end_s - begin_s)
            if self._timeline is not None:
                self._timeline.add(row, name, begin_s, end_s)

    def count_attention(
        self, name: str, job: JobTimes, spans: Sequence[tuple[float, float]]
    ) -> None:
        """Add a job of the attention processes; `spans` is when each of them worked for it."""
        self.times.attention_s += job.longest_s
        self.times.kv_read_bytes += job.kv_read_bytes
        if self._timeline is not None:
            for i, (begin_s, end_s) in enumerate(spans):
                if end_s > begin_s:
                    self._timeline.add(f"attention process {i}", name, begin_s, end_s)

    def stop(self) -> StepTimes:
        """The step is over."""
        self.times.total_s = time.perf_counter() - self._begin_s
        return self.times
