"""One line of JSON for each executed step: what it held and where its time went."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moelens.v1.gpu_worker_pb2 import StepTimes

from planner.costs import StepLoad
from planner.scheduler import Step

TIMES = (
    "total_s",
    "device_s",
    "attention_s",
    "link_s",
    "sampling_s",
    "idle_link_s",
    "idle_attention_s",
    "idle_other_s",
    "wait_for_plan_s",
    "kv_read_bytes",
    "weights_streamed_bytes",
    "gemm_s",
    "routing_s",
)


@dataclass(frozen=True)
class StepOutcome:
    """A step that was executed: what it held, the worker's times, and what it cost here."""

    step: Step
    times: StepTimes
    planned_at_s: float  # time.monotonic when scheduling began
    applied_at_s: float  # and when its result came
    wall_s: float  # since the result before it, or since its plan
    plan_s: float  # scheduling, encoding and sending
    apply_s: float  # giving out its tokens


class StepLog:
    """Writes to a file as the steps come; `close` when done."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", buffering=1)

    def __call__(self, outcome: StepOutcome) -> None:
        """Note a step."""
        json.dump(step_record(outcome), self._file)
        self._file.write("\n")

    def close(self) -> None:
        """No more steps."""
        self._file.close()


def step_record(outcome: StepOutcome) -> dict[str, Any]:
    """Field names end in their unit; counts as the planner's StepLoad names them."""
    return {
        "step": outcome.step.step_id,
        "preempted": len(outcome.step.preempted),
        **StepLoad.of(outcome.step)._asdict(),
        "planned_at_s": outcome.planned_at_s,
        "applied_at_s": outcome.applied_at_s,
        "wall_s": outcome.wall_s,
        "plan_s": outcome.plan_s,
        "apply_s": outcome.apply_s,
        **{name: getattr(outcome.times, name) for name in TIMES},
    }
