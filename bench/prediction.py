"""Predicted against measured throughput over a grid: link × KV pool × lengths.

    python bench/prediction.py --model DIR --out docs/prediction.json [--plot docs/prediction.png]
                               [--table] [--cells N] [--seconds-per-cell S]

Each link is profiled once (`moe-lens profile`); each cell is one `moe-lens bench`, whose prediction
is made from that profile and the requests' lengths before the first request is sent. Every other
cell draws its lengths instead of taking them equal.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from planner.spec import ModelSpec

# Rates of the emulated link relative to the one that needs as long for a layer as the device
# needs for a full step; None streams nothing.
LINKS = {"fast": 2.0, "slow": 0.5, "very slow": 0.25}
LENGTHS = ((98, 32), (98, 128), (512, 64), (64, 256))
POOLS = {"ample": 4.0, "tight": 0.45}  # relative to the KV of all sequences that run at once
RUNNING = 48  # sequences at once in a cell


@dataclass(frozen=True)
class Cell:
    """One run."""

    link: str
    pool: str
    prompt_tokens: int
    generated_tokens: int
    drawn: bool
    requests: int
    kv_bytes: int


def cells(model: ModelSpec, rounds: float) -> Iterator[Cell]:
    """The whole grid."""
    index = 0
    for link in LINKS:
        for pool, share in POOLS.items():
            for prompt, generated in LENGTHS:
                tokens = RUNNING * (prompt + generated)
                kv_bytes = int(share * tokens * model.kv_bytes_per_token)
                least = 2 * (prompt + generated + 64) * model.kv_bytes_per_token
                requests = max(RUNNING, round(rounds * RUNNING))
                index += 1
                drawn = index % 2 == 0
                yield Cell(
                    link, pool, prompt, generated, drawn, requests, int(max(kv_bytes, least))
                )


def trace(cell: Cell, path: Path) -> None:
    """Lengths drawn around the cell's: uniform between a half and three halves."""
    source = random.Random(f"{cell}")
    with path.open("w") as file:
        for _ in range(cell.requests):
            drawn = [
                round(tokens * source.uniform(0.5, 1.5))
                for tokens in (cell.prompt_tokens, cell.generated_tokens)
            ]
            line = {"prompt_tokens": drawn[0], "generated_tokens": drawn[1]}
            file.write(json.dumps(line) + "\n")


def moe_lens(*arguments: str) -> str:
    """Output of our command."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"moe-lens {' '.join(arguments)}\n{done.stderr[-3000:]}")
    return done.stdout


def link_rates(model: Path, directory: Path, step_tokens: int) -> dict[str, float]:
    """GB/s of each link, from a profile without one."""
    out = directory / "device.json"
    moe_lens("profile", "--model", str(model), "--out", str(out), "--kv", "256MB")
    found = json.loads(out.read_text())
    per_token_s = found["device_time_per_token_s"]["value"]
    spec = ModelSpec.from_directory(model)
    layer_bytes = spec.streamed_bytes_per_pass / spec.n_layers
    balanced = layer_bytes / (per_token_s * step_tokens)
    return {name: factor * balanced / 1e9 for name, factor in LINKS.items()}


def run_cell(
    cell: Cell, model: Path, profile: Path, rate: float, directory: Path
) -> dict[str, Any]:
    """Predicted and measured figures of a cell."""
    flags = ["--model", str(model), "--kv", str(cell.kv_bytes), "--hardware", str(profile)]
    flags += ["--emulate-link-gb-per-s", f"{rate:.6g}", "--max-sequences", str(RUNNING), "--json"]
    if cell.drawn:
        path = directory / "trace.jsonl"
        trace(cell, path)
        flags += ["--trace", str(path)]
    else:
        lengths = ["--prompt", str(cell.prompt_tokens), "--generate", str(cell.generated_tokens)]
        flags += [*lengths, "--requests", str(cell.requests)]
    report = json.loads(moe_lens("bench", *flags))
    return {**asdict(cell), "link_gb_per_s": rate, **report}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, a row for each cell."""
    lines = [
        "| link (GB/s) | KV | p/g | lengths | K | predicted | measured | accuracy | preemptions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['link']} ({r['link_gb_per_s']:.2f}) | {r['pool']} | "
            f"{r['prompt_tokens']}/{r['generated_tokens']} | "
            f"{'drawn' if r['drawn'] else 'equal'} | "
            f"{r['requests']} | {r['predicted']['tokens_per_s']:,.0f} | "
            f"{r['measured']['tokens_per_s']:,.0f} | {r['accuracy']:.1%} | "
            f"{r['measured']['preemptions']} |"
        )
    accuracies = [r["accuracy"] for r in results]
    lines.append("")
    lines.append(f"Mean accuracy {mean(accuracies):.1%}, worst cell {min(accuracies):.1%}.")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Predicted over measured, log-log, with the lines of ±5 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for link in LINKS:
        points = [r for r in results if r["link"] == link]
        axes.scatter(
            [r["measured"]["tokens_per_s"] for r in points],
            [r["predicted"]["tokens_per_s"] for r in points],
            label=f"{link} link",
        )
    low, high = axes.get_xlim()
    low = max(low, 1.0)
    for factor, style in ((1.0, "-"), (1.05, ":"), (0.95, ":")):
        axes.plot([low, high], [factor * low, factor * high], style, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("measured throughput (prompt and generated tokens/s)")
    axes.set_ylabel("predicted throughput (tokens/s)")
    axes.set_title("Prediction before the run; dotted: ±5 %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the grid, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rounds", type=float, default=3.0, help="requests over sequences at once")
    parser.add_argument("--step-tokens", type=int, default=512, help="of a step at a balanced link")
    parser.add_argument("--cells", type=int, help="only the first so many")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rates = link_rates(options.model, directory, options.step_tokens)
        profiles = {}
        for link, rate in rates.items():
            profiles[link] = directory / f"{link}.json"
            moe_lens(
                *("profile", "--model", str(options.model), "--out", str(profiles[link])),
                *("--kv", "256MB", "--emulate-link-gb-per-s", f"{rate:.6g}"),
            )
        grid = list(cells(ModelSpec.from_directory(options.model), options.rounds))
        for cell in grid[: options.cells]:
            result = run_cell(cell, options.model, profiles[cell.link], rates[cell.link], directory)
            results.append(result)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{cell}: {result['accuracy']:.1%}", file=sys.stderr)
    print(table(results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
