"""The KV arena's memory: reserved, zeroed, spread over nodes, and refused in time."""

from __future__ import annotations

import errno
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from native.arena import Arena
from native.errors import InvalidArgumentError
from native.segment import ChannelError
from tests.native.channel_rig import GEOMETRY
from tests.native.test_segment import file_size_limit

SIZE_BYTES = GEOMETRY.sizes().kv_arena_bytes


def test_all_memory_is_there_zeroed_and_private(tmp_path: Path) -> None:
    with Arena.reserve(tmp_path / "a.kv", GEOMETRY, [0], huge_pages=True) as arena:
        status = arena.path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == arena.size_bytes == SIZE_BYTES
        assert status.st_blocks * 512 >= SIZE_BYTES
        assert bytes(arena.buffer) == bytes(SIZE_BYTES)
        assert arena.huge_page_bytes() <= SIZE_BYTES


def test_what_one_writes_another_reads_even_without_its_name(tmp_path: Path) -> None:
    with Arena.reserve(tmp_path / "a.kv", GEOMETRY, [0], False) as arena:
        with Arena.open(arena.path, GEOMETRY) as other:
            arena.unlink()
            arena.buffer[SIZE_BYTES - 5 : SIZE_BYTES] = b"hello"
            assert bytes(other.buffer[SIZE_BYTES - 5 : SIZE_BYTES]) == b"hello"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n_nodes", [2, 3, 8])
def test_nodes_that_do_not_exist_do_not_matter(tmp_path: Path, n_nodes: int) -> None:
    geometry = replace(GEOMETRY, n_nodes=n_nodes)
    with Arena.reserve(tmp_path / "a.kv", geometry, range(n_nodes), False) as arena:
        assert bytes(arena.buffer) == bytes(SIZE_BYTES)


def test_as_many_nodes_as_the_geometry_says(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="nodes"):
        Arena.reserve(tmp_path / "a.kv", GEOMETRY, [0, 1], False)
    assert list(tmp_path.iterdir()) == []


def test_an_arena_of_another_size_is_refused(tmp_path: Path) -> None:
    with (
        Arena.reserve(tmp_path / "a.kv", GEOMETRY, [0], False) as arena,
        pytest.raises(ChannelError, match=r"a\.kv"),
    ):
        Arena.open(arena.path, replace(GEOMETRY, n_layers=3))


def test_memory_that_cannot_be_reserved_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(100_000), pytest.raises(OSError, match=r"a\.kv"):
        Arena.reserve(tmp_path / "a.kv", GEOMETRY, [0], False)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with less room than the arena needs."""
    size = f"size={SIZE_BYTES // 2}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "moe-lens-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_tmpfs_is_an_error_and_no_bus_error(small_tmpfs: Path) -> None:
    with pytest.raises(OSError, match=r"a\.kv") as error:
        Arena.reserve(small_tmpfs / "a.kv", GEOMETRY, [0], False)
    assert error.value.errno == errno.ENOSPC
    assert list(small_tmpfs.iterdir()) == []
