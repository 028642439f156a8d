"""Predicted against measured throughput over a grid: link × KV pool × lengths.

    python bench/prediction.py --model DIR --out FILE [--plot docs/prediction.png] [--rounds R]
        [--links GB_PER_S ...] [--resident SIZE] [--cells N]

Each emulated link is profiled once (`moe-lens profile`); each cell is one `moe-lens bench`, whose
prediction is made from that profile and the requests' lengths before the first request is sent.
Every other cell draws its lengths instead of taking them equal.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from planner.spec import ModelSpec

LINKS = ("fast", "slow", "very slow")
LENGTHS = ((98, 32), (512, 64), (98, 128), (64, 256))
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
    grid = product(enumerate(LENGTHS), enumerate(LINKS), enumerate(POOLS.items()))
    for (i, (prompt, generated)), (j, link), (k, (pool, share)) in grid:
        kv_bytes = share * RUNNING * (prompt + generated) * model.kv_bytes_per_token
        least_bytes = 2 * (prompt + generated + 64) * model.kv_bytes_per_token
        yield Cell(
            link,
            pool,
            prompt,
            generated,
            drawn=(i + j + k) % 2 == 1,
            requests=max(RUNNING, round(rounds * RUNNING)),
            kv_bytes=int(max(kv_bytes, least_bytes)),
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


def run_cell(
    cell: Cell, model: Path, profile: Path, link: list[str], directory: Path
) -> dict[str, Any]:
    """Predicted and measured figures of a cell."""
    flags = ["--model", str(model), "--kv", str(cell.kv_bytes), "--hardware", str(profile)]
    flags += [*link, "--max-sequences", str(RUNNING), "--json"]
    if cell.drawn:
        path = directory / "trace.jsonl"
        trace(cell, path)
        flags += ["--trace", str(path)]
    else:
        lengths = ["--prompt", str(cell.prompt_tokens), "--generate", str(cell.generated_tokens)]
        flags += [*lengths, "--requests", str(cell.requests)]
    report = json.loads(moe_lens("bench", *flags))
    return {**asdict(cell), **report}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, a row for each cell."""
    lines = [
        "| link (GB/s) | KV | p/g | lengths | K | predicted | measured | accuracy | preemptions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['link']} ({r['link_gb_per_s']:g}) | {r['pool']} | "
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
    parser.add_argument("--links", type=float, nargs=3, default=(8.0, 4.0, 2.0), help="GB/s")
    parser.add_argument("--resident", default="800MB", help="of the weights, never streamed")
    parser.add_argument("--cells", type=int, help="only the first so many")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        links, profiles = {}, {}
        for name, rate in zip(LINKS, options.links, strict=True):
            links[name] = [f"--emulate-link-gb-per-s={rate}", f"--resident={options.resident}"]
            profiles[name] = directory / f"{name}.json"
            command = ["profile", "--model", str(options.model), "--out", str(profiles[name])]
            moe_lens(*command, "--kv=512MB", f"--max-sequences={RUNNING}", *links[name])
        rates = dict(zip(LINKS, options.links, strict=True))
        grid = list(cells(ModelSpec.from_directory(options.model), options.rounds))
        for cell in grid[: options.cells]:
            link = cell.link
            result = run_cell(cell, options.model, profiles[link], links[link], directory)
            results.append({**result, "link_gb_per_s": rates[link]})
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{cell}: {result['accuracy']:.1%}", file=sys.stderr)
    print(table(results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
