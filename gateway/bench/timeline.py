"""The scheduler's row of a timeline that the GPU worker wrote on the same machine."""

import json
from collections.abc import Sequence
from pathlib import Path

ROW = "scheduler"


def add_scheduler(path: Path, steps: Sequence[dict[str, float]]) -> None:
    """Add what the gateway did for each step to a Chrome trace: schedule, encode and send before
    it, give out its tokens after it. Both sides' times are of the machine's monotonic clock."""
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    row = 1 + max((event["tid"] for event in events), default=-1)
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": ROW}})
    for step in steps:
        parts = (("plan", "planned_at_s", "plan_s"), ("apply", "applied_at_s", "apply_s"))
        for name, begin, duration in parts:
            events.append(
                {
                    "ph": "X",
                    "name": f"{name} {step['step']:.0f}",
                    "pid": 1,
                    "tid": row,
                    "ts": step[begin] * 1e6,
                    "dur": step[duration] * 1e6,
                }
            )
    path.write_text(json.dumps(trace) + "\n")
