"""What is refused before any memory is taken, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpu_worker.memory import (
    RAM_HEADROOM_BYTES,
    MemoryFound,
    MemoryRefused,
    check_memory,
    file_system,
    find_memory,
)
from native.segment import SegmentSizes

GIB = 2**30
SIZES = SegmentSizes(
    segment_bytes=2 * GIB,
    kv_arena_bytes=10 * GIB,
    block_table_bytes=GIB // 2,
    activation_bytes=GIB,
    scratch_bytes=GIB,
)


def found(ram: int, shm: int) -> MemoryFound:
    return MemoryFound(ram, "MemAvailable", shm, Path("/some/shm"))


def test_what_just_fits_is_taken() -> None:
    check_memory(SIZES, found(13 * GIB + RAM_HEADROOM_BYTES, 12 * GIB))


def test_a_small_shared_memory_directory_is_refused_with_the_remedy() -> None:
    with pytest.raises(MemoryRefused) as error:
        check_memory(SIZES, found(100 * GIB, 12 * GIB - 1))
    text = str(error.value)
    assert "/some/shm has 12.00 GiB free, 12.00 GiB are needed" in text
    assert "--shm-dir" in text
    assert "of RAM can be had" not in text


def test_too_little_ram_is_refused_with_what_bounds_it() -> None:
    with pytest.raises(MemoryRefused, match=r"13\.00 GiB of RAM can be had \(MemAvailable\)"):
        check_memory(SIZES, found(13 * GIB, 12 * GIB))


def test_a_refusal_itemises_every_part() -> None:
    with pytest.raises(MemoryRefused) as error:
        check_memory(SIZES, found(GIB, GIB))
    text = str(error.value)
    for part in (
        "KV cache 10.00 GiB",
        "activation slots 1.00 GiB",
        "block tables 512.0 MiB",
        "task words and partial results 512.0 MiB",
        "scratch of the attention processes 1.00 GiB",
    ):
        assert part in text
    assert "/some/shm" in text
    assert "RAM" in text


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    return tmp_path


def test_ram_is_what_the_kernel_calls_available(proc: Path, tmp_path: Path) -> None:
    memory = find_memory(tmp_path, proc, tmp_path / "no-cgroup")
    assert (memory.ram_available_bytes, memory.ram_bound) == (2 * 2**20, "MemAvailable")
    assert memory.shm_free_bytes > 0


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [
        ("max", 0, 2 * 2**20),
        (2**20, 2**19, 2**19 + 4096),  # the page cache in use is given back
        (2**30, 0, 2 * 2**20),
        (2**20, 2**21, 0),
    ],
)
def test_a_cgroups_limit_bounds_ram(
    proc: Path, tmp_path: Path, limit: object, current: int, expected: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.stat").write_text("anon 7\nactive_file 1024\ninactive_file 3072\n")
    assert find_memory(tmp_path, proc, tmp_path).ram_available_bytes == expected


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find_memory(tmp_path / "absent")


def test_the_innermost_mount_tells_the_file_system(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    inner = tmp_path / "shm"
    inner.mkdir()
    table.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {inner} rw shared:1 - tmpfs none rw\n"
    )
    assert file_system(inner, table) == "tmpfs"
    assert file_system(tmp_path, table) == "ext4"
    assert file_system(tmp_path, tmp_path / "absent") == ""
    assert file_system(Path("/proc")) == "proc"
