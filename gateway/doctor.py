"""`moe-lens doctor`: what this machine has, what that means, what to change.

Every finding is read from the kernel's files below `root`, so that tests bring their own machine.
"""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from planner.units import format_bytes

app = typer.Typer(add_completion=False)

FINE, WARNING, PROBLEM = "fine", "warning", "problem"
GIB = 2**30
# Attention is limited by reading memory; these read it widest.
WIDE = ("avx512_bf16", "avx512")


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    subject: str
    status: str  # fine, warning or problem
    found: str
    meaning: str
    advice: str = ""


@dataclass(frozen=True)
class Machine:
    """Where to look."""

    root: Path = Path("/")

    def read(self, path: str) -> str:
        """A kernel file's text, "" when there is none."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    def meminfo_bytes(self, name: str) -> int | None:
        """A line of /proc/meminfo."""
        for line in self.read("proc/meminfo").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return None

    def chosen(self, path: str) -> str:
        """The bracketed word of files such as "always [madvise] never"."""
        words = self.read(path).split()
        return next((word.strip("[]") for word in words if word.startswith("[")), "")


def instruction_sets(machine: Machine) -> Finding:
    """What the kernels can use; asked of the kernels themselves."""
    from native._attention import lib

    from native import isa

    names, used = isa.supported(lib), isa.selected(lib)
    found = f"{', '.join(names)}; used: {used}"
    if used in WIDE:
        return Finding("instruction sets", FINE, found, "attention runs on 512-bit registers")
    if used == "avx2":
        meaning = "attention runs on 256-bit registers, up to half as fast in the cache"
        return Finding("instruction sets", FINE, found, meaning)
    meaning = "attention runs on plain code, several times slower"
    forced = "unset MOE_LENS_ISA" if "MOE_LENS_ISA" in os.environ else "use a CPU with AVX2"
    return Finding("instruction sets", WARNING, found, meaning, forced)


def cores(machine: Machine) -> Finding:
    """Cores that this process may use, and how much of them."""
    allowed = len(os.sched_getaffinity(0))
    siblings = machine.read("sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    threads = len(_expand(siblings)) or 1
    found = f"{allowed} logical CPUs, {max(allowed // threads, 1)} cores"
    quota = machine.read("sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        limit = int(quota[0]) / int(quota[1])
        found += f", limited to {limit:.1f} CPUs"
        if limit < allowed:
            return Finding(
                "cores",
                WARNING,
                found,
                "attention processes beyond the limit are stopped in the middle of a step",
                f"run with --attention-processes {max(int(limit), 1)}, or raise the limit",
            )
    if allowed < 4:
        meaning = "GEMMs and attention share the cores; enough to try, not for throughput"
        return Finding("cores", FINE, found, meaning)
    return Finding("cores", FINE, found, "one attention process for each core by default")


def numa(machine: Machine) -> Finding:
    """Memory nodes."""
    nodes = _expand(machine.read("sys/devices/system/node/online"))
    if not nodes:
        meaning = "the kernel does not say; memory is treated as one node"
        return Finding("NUMA", FINE, "no information", meaning)
    found = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
    if len(nodes) == 1:
        return Finding("NUMA", FINE, found, "all memory is equally near")
    balancing = machine.read("proc/sys/kernel/numa_balancing")
    meaning = "the KV cache gets an arena on each node; weights lie on the accelerator's"
    if balancing not in ("", "0"):
        advice = "sysctl kernel.numa_balancing=0: moving pages costs bandwidth"
        return Finding("NUMA", WARNING, f"{found}, balancing on", meaning, advice)
    return Finding("NUMA", FINE, found, meaning)


def ram(machine: Machine) -> Finding:
    """Host memory, and what a container may take of it."""
    total = machine.meminfo_bytes("MemTotal") or 0
    free = machine.meminfo_bytes("MemAvailable") or 0
    found = f"{format_bytes(total, binary=True)}, {format_bytes(free, binary=True)} available"
    limit = machine.read("sys/fs/cgroup/memory.max")
    if limit.isdecimal() and int(limit) < total:
        found += f", limited to {format_bytes(int(limit), binary=True)} by a cgroup"
        free = min(free, int(limit) - int(machine.read("sys/fs/cgroup/memory.current") or 0))
    meaning = f"weights and KV cache together may take {format_bytes(free, binary=True)}"
    if free < 4 * GIB:
        advice = "enough for the demo model alone; free memory, or raise the limit"
        return Finding("RAM", WARNING, found, meaning, advice)
    return Finding("RAM", FINE, found, meaning)


def shared_memory(machine: Machine) -> Finding:
    """The file system that the KV cache lies on."""
    directory = machine.root / "dev/shm"
    if not directory.is_dir():
        advice = "mount a tmpfs there, or point --shm-dir at one"
        return Finding("/dev/shm", PROBLEM, "missing", "the KV cache has no place", advice)
    usage = shutil.disk_usage(directory)
    found = (
        f"{format_bytes(usage.total, binary=True)}, {format_bytes(usage.free, binary=True)} free"
    )
    meaning = "the KV cache and the activation slots lie here; its size bounds --kv"
    if usage.free < GIB:
        advice = "mount -o remount,size=SIZE /dev/shm; docker run --shm-size SIZE"
        return Finding("/dev/shm", PROBLEM, found, meaning, advice)
    return Finding("/dev/shm", FINE, found, meaning)


def locked_memory(machine: Machine, limits: tuple[int, int] | None = None) -> Finding:
    """Pinned memory is locked memory."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_MEMLOCK)
    meaning = "weights streamed to an accelerator are pinned; device cpu needs none of it"
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", FINE, "unlimited", meaning)
    found = format_bytes(soft, binary=True)
    advice = "with an accelerator: ulimit -l unlimited, docker run --ulimit memlock=-1"
    if hard != resource.RLIM_INFINITY:
        advice += " (root has to raise the hard limit in /etc/security/limits.conf)"
    return Finding("memlock", WARNING, found, meaning, advice)


def huge_pages(machine: Machine) -> Finding:
    """Transparent huge pages of shared memory."""
    mode = machine.chosen("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    meaning = "pages of 2 MiB spare address translation when attention reads the KV cache"
    if mode in ("advise", "always", "within_size", "force"):
        return Finding("huge pages", FINE, f"shared memory: {mode}", meaning)
    found = f"shared memory: {mode or 'unknown'}"
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding("huge pages", WARNING, found, meaning, f"echo advise > {path}")


def accelerator(machine: Machine, ask: Callable[[], str] | None = None) -> Finding:
    """What the driver reports."""
    listed = (ask or _nvidia_smi)()
    if listed:
        found = "; ".join(line.strip() for line in listed.splitlines())
        return Finding("GPU", FINE, found, "device cuda: weights are streamed to it")
    meaning = "device cpu: GEMMs run on the cores, next to attention"
    if (machine.root / "dev/nvidia0").exists():
        advice = "install the driver's user-space part (nvidia-smi must run)"
        return Finding("GPU", PROBLEM, "/dev/nvidia0, but no driver answers", meaning, advice)
    return Finding("GPU", FINE, "none", meaning)


def _nvidia_smi() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,pcie.link.gen.max",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _expand(text: str) -> list[int]:
    """The numbers of a list such as "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    instruction_sets,
    cores,
    numa,
    ram,
    shared_memory,
    locked_memory,
    huge_pages,
    accelerator,
)
MARKS = {FINE: "[green]✓[/]", WARNING: "[yellow]![/]", PROBLEM: "[red]✗[/]"}


def examine(machine: Machine) -> list[Finding]:
    """All findings."""
    return [check(machine) for check in CHECKS]


@app.command("doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Look at this machine. Exit status 1 when something keeps the services from running."""
    findings = examine(Machine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        _print(findings)
    raise typer.Exit(1 if any(f.status == PROBLEM for f in findings) else 0)


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        text = escape(finding.found) + f"\n[dim]{escape(finding.meaning)}[/]"
        if finding.advice:
            text += f"\n→ {escape(finding.advice)}"
        table.add_row(MARKS[finding.status], finding.subject, text)
    Console().print(table)
