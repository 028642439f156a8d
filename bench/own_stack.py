"""One run of our services through the gateway, with what it cost: time, CPU and memory."""

import contextlib
import json
import os
import resource
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOE_LENS = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "moe-lens"
SAMPLE_PERIOD_S = 5.0  # a sample walks the page tables of all processes


@dataclass(frozen=True)
class Lengths:
    """K requests, each of p prompt and g generated tokens."""

    requests: int
    prompt: int
    generate: int

    @property
    def generated_tokens(self) -> int:
        """Of all requests."""
        return self.requests * self.generate

    @property
    def total_tokens(self) -> int:
        """Prompt and generated."""
        return self.requests * (self.prompt + self.generate)

    def __str__(self) -> str:
        return f"{self.requests}, {self.prompt}, {self.generate}"


class BenchFailed(RuntimeError):
    """A system did not finish."""


def run(model: Path, lengths: Lengths, flags: list[str], timeout_s: float) -> dict[str, Any]:
    """What `moe-lens bench --json --iterations` says, and `cpu_s` and `peak_pss_bytes` of all its
    processes together (loading and the load generator included). BenchFailed tells why not."""
    command = [str(MOE_LENS), "bench", f"--model={model}", "--json", "--iterations", *flags]
    command += [f"--requests={lengths.requests}", f"--prompt={lengths.prompt}"]
    command += [f"--generate={lengths.generate}"]
    before_s = cpu_of_children_s()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        memory = MemoryWatch(process.pid)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            raise BenchFailed(f"not done after {timeout_s:.0f} s") from None
        finally:
            memory.stop()
    if process.returncode:
        raise BenchFailed(err.decode(errors="replace").strip()[-500:])
    found: dict[str, Any] = json.loads(out)
    found["cpu_s"] = cpu_of_children_s() - before_s
    found["peak_pss_bytes"] = memory.peak_bytes
    found["peak_pss_by_process_bytes"] = memory.peak_by_process
    return found


def cpu_of_children_s() -> float:
    """CPU seconds of all processes that were started here, or by those, and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class MemoryWatch:
    """The largest sum of proportional set sizes of a process and all its descendants: memory
    that several of them map counts once."""

    def __init__(self, root: int) -> None:
        self.peak_bytes = 0
        self.peak_by_process: dict[str, int] = {}
        self._root = root
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_PERIOD_S):
            sizes = [(name_of(pid), pss_bytes(pid)) for pid in family(self._root)]
            total = sum(size for _, size in sizes)
            if total > self.peak_bytes:
                self.peak_bytes, self.peak_by_process = total, {}
                for name, size in sizes:
                    self.peak_by_process[name] = self.peak_by_process.get(name, 0) + size


def family(root: int) -> list[int]:
    """The process and its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(Path(f"/proc/{int(entry)}/stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def name_of(pid: int) -> str:
    """The service that a process is; "bench" for the launcher and load generator."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        for service in ("gpu-worker", "cpu-worker", "gateway", "planner"):
            if service in words[:5]:
                return service
        if "cpu_worker.attention_process" in words:
            return "attention process"
    return "bench"


def pss_bytes(pid: int) -> int:
    """0 when the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
