"""CPU seconds of the same work, ours and a peer's: for a machine that is never quiet.

    python bench/cpu_cost.py --model DIR [--setting K,p,g] [--peers DIR --peer-scripts DIR]
        [--systems NAME ...] [--json FILE]

Where everything is bound by the cores, throughput goes as CPU seconds do, and these depend less on
who else wants the cores. Ours are those of all services and the client, from the first request to
the last token. A peer's are its process's: its script runs with the clock replaced, and with
threads that sleep when they wait, since a busy machine would make them spin. (vLLM works in a
second process, which this way misses.) The GEMM limit is the CPU time of the products alone at the
best rate of one thread of torch, by that thread's CPU time.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from end_to_end import FLOP_PER_TOKEN, HEAD_FLOP_PER_TOKEN, MATMUL, OURS, PEERS, parse_setting
from own_stack import Lengths as Setting
from own_stack import family

from gateway.bench.run import send_all
from gateway.launcher import Stack, StackConfig
from planner.workload import Lengths

QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
WITH_CPU_CLOCK = (
    "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = sys.argv[1:];"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)


def cpu_s(pids: list[int]) -> float:
    """User and system time of processes that are alive."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def ours_s(model: Path, setting: Setting) -> float:
    """Services and client."""
    flags = ("--max-waiting-requests=1024",)
    config = StackConfig(model=model, options={"gateway": flags}, show_logs=False)
    async with Stack(config) as stack:
        await send_all(stack.address, [Lengths(16, 4)] * 8)  # warm-up
        before_s = cpu_s(family(os.getpid()))
        lengths = [Lengths(setting.prompt, setting.generate)] * setting.requests
        await send_all(stack.address, lengths)
        return cpu_s(family(os.getpid())) - before_s


def peer_s(system: str, peers: Path, scripts: Path, setting: Setting) -> float:
    """Of the timed part of its script."""
    environment, script, model = PEERS[system]
    command = [str(peers / environment / "bin" / "python"), "-c", WITH_CPU_CLOCK]
    command += [str(scripts / script), str(peers / model), str(setting.requests)]
    command += [str(setting.prompt), str(setting.generate)]
    out = subprocess.check_output(
        command, stderr=subprocess.DEVNULL, cwd=peers, env=os.environ | QUIET_THREADS
    )
    line = [line for line in out.splitlines() if line.startswith(b"{")][-1]
    return setting.generated_tokens / float(json.loads(line)["generated_tokens_per_s"])


def limit_s(setting: Setting) -> float:
    """CPU seconds of the matrix products alone."""
    code = (MATMUL % 1).replace("perf_counter", "thread_time")
    rate = float(subprocess.check_output([sys.executable, "-c", code]))
    flop = FLOP_PER_TOKEN * setting.total_tokens + HEAD_FLOP_PER_TOKEN * setting.generated_tokens
    return flop / rate


def main() -> None:
    """Prints a line for each system."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--setting", type=parse_setting, default=Setting(128, 98, 32))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--peer-scripts", type=Path)
    parser.add_argument(
        "--systems", nargs="*", default=[OURS], choices=[OURS, "transformers", "llama.cpp"]
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"setting": str(options.setting), "limit": limit_s(options.setting)}
    print(f"GEMM limit: {found['limit']:.1f} CPU s", flush=True)
    for system in options.systems:
        if system == OURS:
            found[system] = asyncio.run(ours_s(options.model, options.setting))
        else:
            found[system] = peer_s(system, options.peers, options.peer_scripts, options.setting)
        share = found["limit"] / found[system]
        print(f"{system}: {found[system]:.1f} CPU s, {share:.0%} of the limit", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
