"""`moe-lens bench`: predicted beside measured, and a timeline of all who worked."""

import json
import os
import subprocess
import sys
from pathlib import Path

KEYS = {
    "predicted": {"tokens_per_s", "generated_tokens_per_s", "total_s", "seconds_by_limit"},
    "measured": {"tokens_per_s", "generated_tokens_per_s", "total_s", "seconds_by_limit", "busy_s"},
}


def test_bench_reports_and_draws_every_worker(demo_model: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "trace.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gateway.cli", "bench", f"--model={demo_model}"),
            *("--requests=6", "--prompt=20", "--generate=8", "--kv=8MiB", "--json"),
            *(
                "--emulate-link-gb-per-s=1",
                "--resident=0",
                "--attention-processes=2",
                f"--timeline={timeline}",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MOE_LENS_MEASURE": "true"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for side, keys in KEYS.items():
        assert keys <= report[side].keys()
        assert report[side]["tokens_per_s"] > report[side]["generated_tokens_per_s"] > 0
    assert report["measured"]["steps"] >= 8
    events = json.loads(timeline.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"device", "link", "attention process 0", "scheduler"} <= set(rows.values())
    spans = {name: [e for e in events if e["ph"] == "X" and rows[e["tid"]] == name]
             for name in rows.values()}  # fmt: skip
    assert all(span["dur"] >= 0 for row in spans.values() for span in row)
    # One clock: each step's plan comes before the first GA that follows it, and within the run.
    begin = min(span["ts"] for span in spans["device"])
    end = max(span["ts"] + span["dur"] for span in spans["device"])
    plans = [span["ts"] for span in spans["scheduler"] if span["name"].startswith("plan")]
    assert len(plans) >= 8
    assert begin - 5e6 < min(plans) < max(plans) < end
    attention = [span for name, row in spans.items() if name.startswith("att") for span in row]
    assert all(begin < span["ts"] < end for span in attention)
