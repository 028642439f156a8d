"""Where attention processes run: NUMA nodes and cores that this process may use.

Everything is read from /sys and degrades to "one node, all allowed cores" where it is missing, as
in many containers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Node:
    """A NUMA node: the kernel's number, and the cores of it that this process may use."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where one attention process runs."""

    node_index: int  # into Placement.nodes
    cpu: int  # -1: not pinned


@dataclass(frozen=True)
class Placement:
    """Places of all attention processes; `nodes` are those that have at least one."""

    nodes: tuple[Node, ...]
    places: tuple[Place, ...]

    def cpus(self, index: int) -> tuple[int, ...]:
        """Cores that process `index` is bound to: its own, or its node's where it has none of its
        own; empty: wherever this process may run."""
        chosen = self.places[index]
        if chosen.cpu >= 0:
            return (chosen.cpu,)
        return self.nodes[chosen.node_index].cpus if len(self.nodes) > 1 else ()


def parse_cpu_list(text: str) -> list[int]:
    """The numbers of a kernel list such as "0-3,8,10-11"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def read_nodes(system: Path = SYSTEM, allowed: frozenset[int] | None = None) -> tuple[Node, ...]:
    """NUMA nodes with at least one allowed core (`allowed`: by default this process's affinity).

    In each, one hardware thread of every core comes before the second threads.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = []
    for path in sorted(system.glob("node/node[0-9]*"), key=_number):
        cpus = allowed.intersection(_read_list(path / "cpulist"))
        if cpus:
            nodes.append(Node(_number(path), _threads_last(cpus, system)))
    found = frozenset(cpu for node in nodes for cpu in node.cpus)
    if found != allowed:
        return (Node(0, _threads_last(allowed, system)),)
    return tuple(nodes)


def default_processes(nodes: Sequence[Node], system: Path = SYSTEM, cgroup: Path = CGROUP) -> int:
    """As many as there are cores (not hardware threads), within the cgroup's CPU limit."""
    cores = {_first_thread(cpu, system) for node in nodes for cpu in node.cpus}
    limit = _cpu_limit(cgroup)
    return max(1, len(cores) if limit is None else min(len(cores), math.ceil(limit)))


def place(nodes: Sequence[Node], n_processes: int, pin: bool, max_nodes: int) -> Placement:
    """Spread processes over nodes by their number of cores, neighbours on the same node.

    Pinned to a core each, unless `pin` is false or there are more processes than cores (two on one
    core would be worse off than where the scheduler puts them).
    """
    cores = [(index, cpu) for index, node in enumerate(nodes) for cpu in node.cpus]
    pin = pin and n_processes <= len(cores)
    chosen = _spread(nodes, n_processes) if pin else []
    if not pin:
        chosen = [(cores[i * len(cores) // n_processes][0], -1) for i in range(n_processes)]
    used = sorted({index for index, _ in chosen})
    if len(used) > max_nodes:
        one = Node(nodes[used[0]].number, tuple(cpu for _, cpu in cores))
        return Placement((one,), tuple(Place(0, cpu) for _, cpu in chosen))
    places = tuple(Place(used.index(index), cpu) for index, cpu in chosen)
    return Placement(tuple(nodes[index] for index in used), places)


def _spread(nodes: Sequence[Node], n_processes: int) -> list[tuple[int, int]]:
    """(node index, core) of each process: an equal share of every node's cores."""
    total = sum(len(node.cpus) for node in nodes)
    chosen: list[tuple[int, int]] = []
    seen = 0
    for index, node in enumerate(nodes):
        seen += len(node.cpus)
        share = round(n_processes * seen / total) - len(chosen)
        chosen += [(index, cpu) for cpu in node.cpus[:share]]
    return chosen


def _threads_last(cpus: frozenset[int], system: Path) -> tuple[int, ...]:
    seen: set[int] = set()
    first: list[int] = []
    rest: list[int] = []
    for cpu in sorted(cpus):
        core = _first_thread(cpu, system)
        (rest if core in seen else first).append(cpu)
        seen.add(core)
    return (*first, *rest)


def _first_thread(cpu: int, system: Path) -> int:
    """The lowest hardware thread of the core that `cpu` belongs to."""
    return min(_read_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list"), default=cpu)


def _read_list(path: Path) -> list[int]:
    try:
        return parse_cpu_list(path.read_text())
    except (OSError, ValueError):
        return []


def _number(path: Path) -> int:
    return int(path.name.removeprefix("node"))


def _cpu_limit(cgroup: Path) -> float | None:
    """Cores' worth of CPU time that the cgroup (v2) allows; None: no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        return None
