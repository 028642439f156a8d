"""How fast the scheduler plans and the simulation runs.

    python bench/simulate.py [--requests N ...] [--json FILE]

The paper's case of 98 prompt and 64 generated tokens over 70 GB of KV (Mixtral-8x7B), which
preempts for two fifths of the time. CPU seconds are what counts on a busy machine; peak memory is
the process's. Then the planner's part of a step (schedule and apply) over running sequences.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner import catalogue
from planner.blocks import BlockPool
from planner.costs import IterationCosts
from planner.request import Sequence, SequenceId
from planner.scheduler import Scheduler, SchedulerLimits
from planner.simulate import Request, simulate

PROMPT_TOKENS, GENERATED_TOKENS = 98, 64
N_REAL_TOKENS = 18_236
KV_BYTES = 70e9


def time_simulation(requests: int) -> dict[str, float]:
    """Simulate `requests` requests and say what that took."""
    model, machine = catalogue.model("mixtral-8x7b"), catalogue.hardware("a40-xeon8380")
    pace = N_REAL_TOKENS / (PROMPT_TOKENS + GENERATED_TOKENS)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = simulate(
        [Request(PROMPT_TOKENS, GENERATED_TOKENS)] * requests,
        IterationCosts.from_specs(model, machine),
        SchedulerLimits(N_REAL_TOKENS, prompts_per_step=pace),
        kv_blocks=model.kv_capacity_tokens(KV_BYTES) // 16,
    )
    return {
        "requests": requests,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
        "steps": len(result.steps),
        "tokens_per_s": result.tokens_per_s,
        "preemption_share": result.preemption_share,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def time_steps(running: int, steps: int = 200) -> dict[str, float]:
    """CPU milliseconds of schedule and apply with `running` decoding sequences, one step ahead."""
    scheduler = Scheduler(BlockPool(running * 40), SchedulerLimits(10**6))
    for number in range(running):
        scheduler.add(Sequence(SequenceId(number), 50 + number % 100, 450, arrival=number))
    ahead = scheduler.schedule()
    taken_s = []
    for _ in range(steps):
        begin_s = time.process_time()
        following = scheduler.schedule()
        assert ahead is not None
        scheduler.apply(ahead)
        taken_s.append(time.process_time() - begin_s)
        ahead = following
    return {"running": running, "step_ms": statistics.median(taken_s) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps = [time_steps(running) for running in (64, 2_000, 4_000)]
    for row in steps:
        print(f"{row['running']:>8} running: {row['step_ms']:.3f} ms a step")
    runs = []
    for requests in options.requests:
        runs.append(run := time_simulation(requests))
        print(
            f"{requests:>8} requests: {run['cpu_s']:.2f} s of CPU, {run['wall_s']:.2f} s,"
            f" {run['steps']} steps, peak {run['peak_memory_bytes'] / 1e6:.0f} MB,"
            f" {run['tokens_per_s']:.0f} tokens/s, preemption {run['preemption_share']:.0%}"
        )
    if options.json:
        options.json.write_text(json.dumps({"steps": steps, "simulations": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
