"""Steps that fail in the engine: what the caller is told, and how a hang is told from work."""

import time
from typing import Any

import grpc
import pytest
from moelens.v1 import gpu_worker_pb2

from gpu_worker.errors import PlanError, is_out_of_memory
from gpu_worker.service import Epoch, GpuWorkerService, _Stream
from gpu_worker.weights import LoadProgress
from native.channel import WaitTimeout
from protos.errors import ServiceError


class Failing:
    """An engine and a session at once: `run` raises."""

    def __init__(self, error: Exception, service: GpuWorkerService, run_s: float = 0.0) -> None:
        self.error = error
        self.run_s = run_s
        self.service = service
        self.hung = False

    def apply(self, plan: Any) -> Any:
        return plan

    def run(self, batch: Any) -> Any:
        time.sleep(self.run_s)
        self.hung = self.service.hangs
        raise self.error


def failed(error: Exception, run_s: float = 0.0, timeout_s: float = 0.0) -> tuple[Any, Failing]:
    """What a step that raises `error` ends with."""
    service = GpuWorkerService(LoadProgress())
    engine: Any = Failing(error, service, run_s)
    stream = _Stream(Epoch(1, engine, engine), engine)
    with pytest.raises(ServiceError) as caught:
        service._step(stream, gpu_worker_pb2.StepPlan(step_id=1, timeout_s=timeout_s))
    assert not service.hangs
    return caught.value, engine


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (MemoryError(), "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY"),
        (RuntimeError("CUDA out of memory. Tried …"), "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "RESOURCE_EXHAUSTED",
            "OUT_OF_MEMORY",
        ),
        (ValueError("boom"), "INTERNAL", "STEP_FAILED"),
        (PlanError("plan.starts", "no"), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (WaitTimeout("slot 0"), "UNAVAILABLE", "CPU_WORKER_LOST"),
    ],
)
def test_failed_step_says_what_may_be_done_about_it(
    error: Exception, code: str, reason: str
) -> None:
    told, _ = failed(error)
    assert (told.code, told.reason) == (grpc.StatusCode[code], reason)


def test_step_that_takes_longer_than_its_plan_allows_counts_as_hung() -> None:
    _, slow = failed(ValueError("late"), run_s=0.05, timeout_s=0.02)
    assert slow.hung
    _, fast = failed(ValueError("in time"), run_s=0.01, timeout_s=60.0)
    assert not fast.hung
    _, unbounded = failed(ValueError("no bound"), run_s=0.05, timeout_s=0.0)
    assert not unbounded.hung


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not is_out_of_memory(ValueError("shape"))
