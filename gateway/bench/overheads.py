"""What the services themselves cost a step: measured through them, for the planner."""

import tempfile
from pathlib import Path

from gateway.bench.run import read_steps, send_all, worker_info
from gateway.launcher import Stack, StackConfig
from gateway.prediction import worker_costs
from planner.calibrate import calibrate_overheads
from planner.costs import StepLoad
from planner.spec import ModelSpec
from planner.workload import Lengths

LENGTHS = Lengths(32, 24)
# Requests at once, as far as so many may run.
COUNTS = (2, 8, 32, 64)


async def measure_overheads(config: StackConfig) -> dict[str, float]:
    """step_overhead_s and step_overhead_sequence_s of a stack whose GPU worker has a profile.

    Some small batches are sent one after the other; the steps' wall times are compared with what
    the profile predicts for them. Raises StackError where the services cannot run.
    """
    with tempfile.TemporaryDirectory(prefix="moe-lens-bench-") as directory:
        log = Path(directory) / "steps.jsonl"
        async with Stack(config.with_flags("gateway", [f"--step-log={log}"])) as stack:
            info = await worker_info(stack)
            counts = sorted({min(count, info.max_sequences) for count in COUNTS})
            await send_all(stack.address, [LENGTHS] * counts[0])  # everything runs once
            first = len(read_steps(log))
            for count in counts:
                await send_all(stack.address, [LENGTHS] * count)
        steps = read_steps(log)[first:]
    costs = worker_costs(info, ModelSpec.from_directory(config.model))
    loads = [StepLoad(*(step[name] for name in StepLoad._fields)) for step in steps]
    walls_s = [step["wall_s"] for step in steps]
    return calibrate_overheads(costs, list(zip(loads, walls_s, strict=True)))
