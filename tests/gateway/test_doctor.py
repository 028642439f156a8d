"""Findings on machines that the tests make up."""

from pathlib import Path

import pytest

from gateway import doctor
from gateway.doctor import FINE, PROBLEM, WARNING, Machine

INFINITY = -1  # RLIM_INFINITY


def machine(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def meminfo(total_gib: int, available_gib: int) -> str:
    return (
        f"MemTotal: {total_gib * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib * 2**20} kB"
    )


def test_ram_counts_what_a_container_may_take(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(64, 60),
        "sys/fs/cgroup/memory.max": str(8 * 2**30),
        "sys/fs/cgroup/memory.current": str(6 * 2**30),
    }
    finding = doctor.ram(machine(tmp_path, files))
    assert finding.status == WARNING
    assert "8.00 GiB by a cgroup" in finding.found
    assert "2.00 GiB" in finding.meaning
    assert finding.advice


def test_ample_ram_is_fine(tmp_path: Path) -> None:
    finding = doctor.ram(machine(tmp_path, {"proc/meminfo": meminfo(64, 60)}))
    assert (finding.status, finding.advice) == (FINE, "")


def test_cpu_limit_of_a_container_is_noticed(tmp_path: Path) -> None:
    limited = doctor.cores(machine(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000"}))
    assert limited.status == WARNING
    assert "--attention-processes 1" in limited.advice
    free = doctor.cores(machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000"}))
    assert free.status == FINE


@pytest.mark.parametrize(
    ("online", "balancing", "status", "found"),
    [
        ("", "", FINE, "no information"),
        ("0", "0", FINE, "1 node"),
        ("0-3", "0", FINE, "4 nodes"),
        ("0,2", "1", WARNING, "2 nodes, balancing on"),
    ],
)
def test_numa_nodes(tmp_path: Path, online: str, balancing: str, status: str, found: str) -> None:
    files = {
        "sys/devices/system/node/online": online,
        "proc/sys/kernel/numa_balancing": balancing,
    }
    finding = doctor.numa(machine(tmp_path, files))
    assert (finding.status, finding.found) == (status, found)


def test_missing_shared_memory_is_a_problem(tmp_path: Path) -> None:
    finding = doctor.shared_memory(Machine(tmp_path))
    assert finding.status == PROBLEM
    assert "--shm-dir" in finding.advice


def test_locked_memory() -> None:
    assert doctor.locked_memory(Machine(), (INFINITY, INFINITY)).status == FINE
    low = doctor.locked_memory(Machine(), (8 * 2**20, 8 * 2**20))
    assert low.status == WARNING
    assert low.found == "8.00 MiB"
    assert "limits.conf" in low.advice
    assert "limits.conf" not in doctor.locked_memory(Machine(), (8 * 2**20, INFINITY)).advice


@pytest.mark.parametrize(
    ("text", "status"),
    [("always within_size [advise] never", FINE), ("always [never]", WARNING), ("", WARNING)],
)
def test_huge_pages_of_shared_memory(tmp_path: Path, text: str, status: str) -> None:
    files = {"sys/kernel/mm/transparent_hugepage/shmem_enabled": text}
    assert doctor.huge_pages(machine(tmp_path, files)).status == status


def test_gpu(tmp_path: Path) -> None:
    assert doctor.accelerator(Machine(tmp_path), lambda: "A40, 46068 MiB, 4").status == FINE
    assert doctor.accelerator(Machine(tmp_path), lambda: "").found == "none"
    broken = machine(tmp_path, {"dev/nvidia0": ""})
    assert doctor.accelerator(broken, lambda: "").status == PROBLEM


def test_plain_code_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from native._attention import lib

    from native import isa

    best = isa.selected(lib)
    try:
        isa.select(lib, "scalar")
        finding = doctor.instruction_sets(Machine())
        assert finding.status == WARNING
        assert "used: scalar" in finding.found
    finally:
        isa.select(lib, best)
    assert doctor.instruction_sets(Machine()).found.endswith(f"used: {best}")
