"""Directories of launchers, living and dead."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gateway.runtime_dir import PREFIX, RuntimeDirectory, remove_stale

KILLED = """
import os, signal
from gateway.runtime_dir import RuntimeDirectory
directory = RuntimeDirectory()
(directory.path / "gateway.sock").touch()
print(directory.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_a_killed_launcher_left_is_removed_and_what_a_living_one_uses_is_not() -> None:
    living = RuntimeDirectory()
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, check=False)
    left = Path(killed.stdout.decode().strip())
    assert left.is_dir()
    assert remove_stale() == [left]
    assert living.path.is_dir()
    living.remove()
    assert not living.path.exists()
    assert remove_stale() == []


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    without_lock = tmp_path / f"{PREFIX}new"
    without_lock.mkdir()
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(without_lock)
    assert remove_stale() == []
    assert without_lock.is_dir()
    assert link.is_symlink()


def test_directory_is_for_its_owner_alone() -> None:
    directory = RuntimeDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
