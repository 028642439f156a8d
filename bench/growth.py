"""Throughput through the gateway against concurrent requests and against context, as a picture.

    python bench/growth.py --model DIR [--picture FILE] [--json FILE] [--rounds N]
        [--peers DIR --peer-scripts DIR]

One set of services for all points. Requests: K = 1 ... 512, each of 64 prompt and 16 generated
tokens. Context: 64 ... 4,096 tokens at the end, 16 of them generated, by as many requests as make
8,192 tokens together. Then the time of a token of a single request, ours beside the peers': the
difference of two runs of one request that generate 64 and 16 tokens, so that neither loading nor
the prompt counts. Points are medians of --rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from end_to_end import PEERS, run_peer
from own_stack import BenchFailed
from own_stack import Lengths as Setting

from gateway.bench.run import send_all
from gateway.launcher import Stack, StackConfig
from planner.workload import Lengths

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096)
PROMPT, GENERATED = 64, 16
CONTEXT_TOKENS = 8192
LATENCY_PROMPT, SHORT, LONG = 64, 16, 64
Point = dict[str, float]


async def series(address: str, rounds: int) -> dict[str, list[Point]]:
    """Both series of points, each point `rounds` times in turn."""
    shapes = {
        "requests": [(n, n, PROMPT) for n in REQUESTS],
        "context": [(c, CONTEXT_TOKENS // c, c - GENERATED) for c in CONTEXTS],
    }
    found: dict[str, list[Point]] = {}
    for name, points in shapes.items():
        rates: dict[int, list[tuple[float, float]]] = {x: [] for x, _, _ in points}
        for i in range(rounds):
            for x, n, prompt in points:
                lengths = [Lengths(prompt, GENERATED)] * max(n, 1)
                measured = await send_all(address, lengths, seed=1000 * i + x)
                rates[x].append((measured.tokens_per_s, measured.generated_tokens_per_s))
                print(f"{name} {x:5}: {measured.tokens_per_s:8.1f} tokens/s", flush=True)
        found[name] = [
            {
                name: x,
                "requests": max(n, 1),
                "prompt_tokens": prompt,
                "tokens_per_s": statistics.median(total for total, _ in rates[x]),
                "generated_tokens_per_s": statistics.median(part for _, part in rates[x]),
            }
            for x, n, prompt in points
        ]
    return found


async def our_token_s(address: str, rounds: int) -> float:
    """Median time between tokens of a request that is alone."""

    async def seconds(generated: int) -> float:
        return (await send_all(address, [Lengths(LATENCY_PROMPT, generated)])).total_s

    found = [await seconds(LONG) - await seconds(SHORT) for _ in range(rounds)]
    return statistics.median(found) / (LONG - SHORT)


def peer_token_s(system: str, peers: Path, scripts: Path, rounds: int, timeout_s: float) -> float:
    """The same of a peer. Raises BenchFailed."""

    def seconds(generated: int) -> float:
        setting = Setting(1, LATENCY_PROMPT, generated)
        record = run_peer(system, peers, scripts, setting, timeout_s)
        return 1 * generated / record["generated_tokens_per_s"]

    found = [seconds(LONG) - seconds(SHORT) for _ in range(rounds)]
    return statistics.median(found) / (LONG - SHORT)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Our series and latency."""
    flags = ("--max-waiting-requests=1024",)
    config = StackConfig(model=options.model, options={"gateway": flags}, show_logs=False)
    async with Stack(config) as stack:
        await send_all(stack.address, [Lengths(PROMPT, GENERATED)] * 8)  # warm-up
        token_s = {"moe-lens": await our_token_s(stack.address, options.rounds)}
        print(f"one request: {1e3 * token_s['moe-lens']:.1f} ms a token", flush=True)
        points = {} if options.latency_only else await series(stack.address, options.rounds)
    return {**points, "single_request_token_s": token_s, "load_average": os.getloadavg()[0]}


def picture(path: Path, found: dict[str, Any]) -> None:
    """Both series, one beside the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = {
        "requests": f"requests at once ({PROMPT} + {GENERATED} tokens each)",
        "context": f"context, tokens ({CONTEXT_TOKENS:,} in all, {GENERATED} generated each)",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        x = [point[name] for point in found[name]]
        for field, label in (
            ("tokens_per_s", "prompt and generated"),
            ("generated_tokens_per_s", "generated"),
        ):
            axis.plot(x, [point[field] for point in found[name]], "o-", label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [f"{value:g}" for value in x])
        axis.set_yscale("log")
        axis.set_xlabel(title)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("tokens/s")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def tables(found: dict[str, Any]) -> str:
    """Markdown."""
    lines: list[str] = []
    for name in ("requests", "context"):
        points: Sequence[Point] = found.get(name, [])
        if points:
            lines += [f"| {name} | requests | tokens/s | generated tokens/s |", "|---|---|---|---|"]
        lines += [
            f"| {p[name]:g} | {p['requests']:g} | {p['tokens_per_s']:,.1f}"
            f" | {p['generated_tokens_per_s']:,.1f} |"
            for p in points
        ]
        lines.append("")
    lines += ["| one request | ms a token |", "|---|---|"]
    for system, token_s in found["single_request_token_s"].items():
        lines.append(
            f"| {system} | {'not measured' if token_s is None else f'{1e3 * token_s:.1f}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures, prints tables, draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--peer-scripts", type=Path)
    parser.add_argument("--systems", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--latency-only", action="store_true")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a peer's run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.peers is not None and options.peer_scripts is not None:
        for system in options.systems:
            try:
                token_s = peer_token_s(
                    system, options.peers, options.peer_scripts, options.rounds, options.timeout
                )
            except BenchFailed as error:
                print(f"{system}: {error}")
                token_s = None
            found["single_request_token_s"][system] = token_s
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))
    if options.picture is not None and not options.latency_only:
        picture(options.picture, found)


if __name__ == "__main__":
    main()
