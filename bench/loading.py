"""Loading a checkpoint against `cat` of the same files, both from the page cache.

    python bench/loading.py --model DIR [--rounds N] [--json FILE]

Each round is a process of its own: `cat`, then as much memory touched for the first time as the
weights take (what the kernel, and under it a hypervisor, needs to hand out pages), then the load.
Resident memory is the process's peak, less what it was before loading.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


MADV_POPULATE_WRITE = 23


def one_round(directory: Path) -> dict[str, float]:
    """Rates in bytes per second of file, and resident bytes."""
    import torch

    from gpu_worker import memory, weights
    from gpu_worker.checkpoint import Checkpoint
    from gpu_worker.cpu_ops import CpuOps
    from gpu_worker.families import family_of

    torch.set_num_threads(1)
    files = sorted(directory.glob("*.safetensors"))
    n_bytes = sum(file.stat().st_size for file in files)
    checkpoint = Checkpoint(directory)
    family = family_of(checkpoint.config)
    config = family.decoder_config(checkpoint.config)
    ops = CpuOps(checkpoint.dtype())
    before_bytes = peak_bytes()

    def cat() -> float:
        begin_s = time.perf_counter()
        subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - begin_s

    cat()
    cat_s = cat()
    touch = (
        "import mmap, time; t = time.perf_counter();"
        f"m = mmap.mmap(-1, {n_bytes}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS);"
        f"m.madvise(mmap.MADV_HUGEPAGE); m.madvise({MADV_POPULATE_WRITE}, 0, {n_bytes});"
        "print(time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", touch], capture_output=True, text=True, check=True)
    begin_s = time.perf_counter()
    store = weights.load(checkpoint, family, config, ops, weights.LoadProgress())
    load_s = time.perf_counter() - begin_s
    assert store.n_bytes >= memory.PAGE_BYTES
    return {
        "cat_bytes_per_s": n_bytes / cat_s,
        "first_touch_bytes_per_s": n_bytes / float(done.stdout),
        "load_bytes_per_s": n_bytes / load_s,
        "share_of_cat": cat_s / load_s,
        "peak_over_weights": (peak_bytes() - before_bytes) / n_bytes,
    }


def peak_bytes() -> int:
    """The process's peak of resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def main() -> None:
    """Rounds in fresh processes, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round(options.model)))
        return
    command = [sys.executable, __file__, "--one", "--model", str(options.model)]
    rounds = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(options.rounds)
    ]
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        print(f"{name:28} {statistics.median(values):14.4g}   of", *(f"{v:.4g}" for v in values))
    if options.json is not None:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
