"""Where the time of a run goes, as a table whose parts sum to the wall time.

    python bench/phases.py --model DIR [--requests K --prompt p --generate g] [--from FILE]

Runs `moe-lens bench` once, or reads what it (or bench/end_to_end.py) wrote. The parts are measured
where they are spent: inside a step by the GPU worker, between steps by the gateway, around them by
the client. They are independent of the wall time, which the client takes: the last line says how
far they miss it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from own_stack import Lengths, run


def phases(measured: dict[str, Any]) -> dict[str, float]:
    """Seconds by phase from `measured` of a run with all its iterations."""
    steps = measured["iterations"]

    def total(name: str) -> float:
        return sum(step[name] for step in steps)

    gemm_s, routing_s, waited_s = total("gemm_s"), total("routing_s"), total("idle_attention_s")
    # While the worker waits for attention nothing else runs: the work of the busiest attention
    # process is attention, the rest is signalling, waking and waiting for a core.
    attention_s = sum(min(step["attention_s"], step["idle_attention_s"]) for step in steps)
    return {
        "GEMM": gemm_s,
        "attention": attention_s,
        "routing and gather": routing_s,
        "norms, rotary, embedding": total("device_s") - gemm_s - routing_s,
        "sampling": total("sampling_s"),
        "channel waits": waited_s - attention_s,
        "worker, between operations": total("idle_other_s") + total("idle_link_s"),
        # A plan that is there in time costs nothing: this is what is not hidden.
        "scheduler and gRPC, steps": total("wall_s") - total("total_s"),
    }


def hidden(measured: dict[str, Any]) -> dict[str, float]:
    """Seconds of scheduling and giving out tokens, most of it while the worker computes."""
    return {
        name: sum(step[field] for step in measured["iterations"])
        for name, field in (("schedule, encode, send", "plan_s"), ("apply results", "apply_s"))
    }


def table(measured: dict[str, Any]) -> str:
    """Markdown."""
    wall_s, found = measured["total_s"], phases(measured)
    rows = ["| phase | s | share of wall |", "|---|---|---|"]
    rows += [f"| {name} | {s:.3f} | {s / wall_s:.1%} |" for name, s in found.items()]
    known_s = sum(found.values())
    rest_s = wall_s - known_s
    rows.append(f"| sum | {known_s:.3f} | {known_s / wall_s:.1%} |")
    rows.append(f"| wall time of the client | {wall_s:.3f} | {rest_s / wall_s:+.1%} unexplained |")
    rows += [
        f"| (hidden: {name}) | {s:.3f} | {s / wall_s:.1%} |" for name, s in hidden(measured).items()
    ]
    return "\n".join(rows)


def main() -> None:
    """Prints the table; fails when its parts miss the wall time by 5 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=98)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=900, help="seconds")
    parser.add_argument("--from", dest="file", type=Path, help="JSON of an earlier run")
    options = parser.parse_args()
    if options.file is not None:
        report = json.loads(options.file.read_text())
    elif options.model is not None:
        lengths = Lengths(options.requests, options.prompt, options.generate)
        report = run(options.model, lengths, [], options.timeout)
    else:
        parser.error("give --model or --from")
    measured = report["measured"]
    print(table(measured))
    missed = abs(1 - sum(phases(measured).values()) / measured["total_s"])
    if missed > 0.05:
        raise SystemExit(f"the phases miss the wall time by {missed:.1%}")


if __name__ == "__main__":
    main()
