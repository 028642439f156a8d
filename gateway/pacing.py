"""What one step may hold, and how fast prompts are started: settings and planner put together."""

from dataclasses import dataclass, replace

from gateway.worker import WorkerInfo
from planner.scheduler import SchedulerLimits


@dataclass(frozen=True)
class EngineConfig:
    """How the engine uses the worker."""

    plan_ahead_steps: int = 2  # plans sent and not answered
    prefill_chunk_tokens: int | None = None  # None: what a step holds
    max_step_tokens: int | None = None  # None: what the worker prefers
    # A worker silent for long during a step counts as dead: after a multiple of the predicted and
    # the measured time of a step, between these two.
    least_step_timeout_s: float = 5.0
    step_timeout_s: float = 120.0
    worker_timeout_s: float = 60.0  # without a worker, or progress of one that loads: out of order
    max_failures: int = 5  # sessions in a row without a result: out of order
    retry_period_s: float = 0.2


def scheduler_limits(info: WorkerInfo, config: EngineConfig) -> SchedulerLimits:
    """What a step may hold on this worker."""
    step_tokens = config.max_step_tokens or info.preferred_step_tokens or info.max_step_tokens
    return SchedulerLimits(
        max_step_tokens=min(step_tokens, info.max_step_tokens),
        max_running_sequences=info.max_sequences,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
    )


def paced(
    limits: SchedulerLimits, prompt_tokens: float, generated_tokens: float, requests: int
) -> SchedulerLimits:
    """With prompts started at q* = n_real / (p + g) (paper, Eq 12), as long as more requests are
    on hand than the q*·g that run in a steady state; fewer may all start at once."""
    pace = limits.max_step_tokens / (prompt_tokens + generated_tokens)
    wanted = pace if requests > pace * generated_tokens else None
    return limits if wanted == limits.prompts_per_step else replace(limits, prompts_per_step=wanted)
