"""Does an iteration cost the largest of its parts? Link times of 2x and 0.5x the compute time.

    python bench/overlap.py --model DIR [--requests K] [--rounds N] [--picture FILE] [--json FILE]

First without a link: what device and attention take for a step of K decodes. Then over emulated
links on which a layer's weights take twice and half as long as its compute. Steps of K decodes
count, medians over steps and then over rounds. --picture draws one iteration of the slower link.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from own_stack import Lengths, run

PROMPT, GENERATED = 16, 24
FACTORS = (2.0, 0.5)
ROW_ORDER = ("link", "device", "attention process 0", "attention process 1", "scheduler")
Step = dict[str, float]


def decode_steps(model: Path, requests: int, flags: list[str]) -> list[Step]:
    """Records of the steps in which every request decodes, but the first and the last few."""
    lengths = Lengths(requests, PROMPT, GENERATED)
    report = run(model, lengths, [f"--max-sequences={requests}", *flags], timeout_s=600)
    steps: list[Step] = report["measured"]["iterations"]
    full = [step for step in steps if step["decode_sequences"] == step["tokens"] == requests]
    return full[2:-2]


def median_of(steps: list[Step], *names: str) -> float:
    """Median of a sum of fields."""
    return statistics.median(sum(step[name] for name in names) for step in steps)


def one_round(model: Path, requests: int, timeline: Path) -> dict[str, float]:
    """Seconds of a step by its parts, and the two ratios."""
    alone = decode_steps(model, requests, [])
    compute_s = median_of(alone, "device_s", "attention_s")
    found = {
        "compute_and_attention_s": compute_s,
        "wall_without_link_s": median_of(alone, "wall_s"),
    }
    streamed_bytes = float(
        sum(file.stat().st_size for file in model.glob("*.safetensors"))
    )  # the link's rate only has to be near: the real transfer time is measured
    for factor in FACTORS:
        rate = streamed_bytes / (factor * compute_s) / 1e9
        flags = [f"--emulate-link-gb-per-s={rate:.6g}", "--resident=0", f"--timeline={timeline}"]
        steps = decode_steps(model, requests, flags if factor == FACTORS[0] else flags[:-1])
        wall_s = median_of(steps, "wall_s")
        transfer_s = median_of(steps, "weights_streamed_bytes") / (rate * 1e9)
        found |= {
            f"link_gb_per_s_{factor}x": rate,
            f"transfer_s_{factor}x": transfer_s,
            f"wall_s_{factor}x": wall_s,
            f"wall_over_transfer_{factor}x": wall_s / transfer_s,
            f"wall_over_compute_{factor}x": wall_s / compute_s,
        }
    return found


def draw(timeline: Path, picture: Path) -> None:
    """One iteration in the middle of a trace, a row for each worker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    events = json.loads(timeline.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    starts = sorted(ts for _, name, ts, _ in spans if name == "GA 0 α")
    middle = len(starts) // 2
    begin, end = starts[middle], starts[middle + 1]
    colors = {"α": "tab:blue", "β": "tab:orange"}
    figure, axes = pyplot.subplots(figsize=(11, 3.2))
    names = [name for name in ROW_ORDER if name in rows.values()]
    for row, name in enumerate(reversed(names)):
        for of, label, ts, dur in spans:
            if of != name or ts + dur < begin or ts > end:
                continue
            waits = label.startswith("wait")
            color = "white" if waits else colors.get(label[-1], "tab:grey")
            left = (max(ts, begin) - begin) / 1e3
            width = (min(ts + dur, end) - max(ts, begin)) / 1e3
            axes.barh(row, width, left=left, color=color, edgecolor="black", linewidth=0.3)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("ms since the first GA of the iteration")
    axes.set_title("One iteration over a slow link: α blue, β orange, weights grey, waiting white")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Rounds, medians, the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory) / "trace.json"
        for _ in range(options.rounds):
            rounds.append(one_round(options.model, options.requests, timeline))
        if options.picture is not None:
            draw(timeline, options.picture)
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        print(f"{name:28} {statistics.median(values):10.4g}   of", *(f"{v:.4g}" for v in values))
    if options.json is not None:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
