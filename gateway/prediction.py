"""What the planner's simulation says of given requests on the worker that is there.

The same scheduler, limits and pool as the engine's, and the worker's own profile: a prediction
before the first token.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from gateway.pacing import EngineConfig, paced, scheduler_limits
from gateway.worker import WorkerInfo
from planner.case import iteration_costs
from planner.costs import IterationCosts
from planner.hardware import HardwareSpec
from planner.simulate import Request, SimulationResult, simulate
from planner.spec import ModelSpec


def worker_costs(info: WorkerInfo, model: ModelSpec) -> IterationCosts:
    """Cost terms of this worker. Raises InvalidInputError where its profile lacks a rate."""
    hardware = HardwareSpec.from_json(json.loads(info.hardware_spec_json))
    costs = iteration_costs(info.stored(model), hardware, info.resident_share)
    return replace(costs, n_groups=2 if info.schedule == "pipelined" else 1)


def predict(
    info: WorkerInfo, model: ModelSpec, config: EngineConfig, requests: Iterable[Request]
) -> SimulationResult:
    """The run of these requests, all there at the start, step by step."""
    work = list(requests)
    prompt_tokens = fmean(request.prompt_tokens for request in work)
    generated_tokens = fmean(request.generated_tokens for request in work)
    limits = scheduler_limits(info, config)
    return simulate(
        work,
        worker_costs(info, model),
        paced(limits, prompt_tokens, generated_tokens, len(work)),
        kv_blocks=info.kv_blocks,
        block_tokens=info.block_tokens,
        plan_ahead=config.plan_ahead_steps,
    )
