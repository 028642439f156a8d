"""What dead owners left is removed; what living ones use is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cpu_worker.stale import remove_stale
from native.segment import Segment, is_owned
from tests.native.channel_rig import GEOMETRY, Control

OWNER = """
import sys, time
from pathlib import Path
from tests.native.channel_rig import GEOMETRY, Control
control = Control(Path(sys.argv[1]), GEOMETRY)
print("made", flush=True)
time.sleep(60)
"""


def start_owner(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(directory)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "made\n"
    return owner


@pytest.mark.timeout(60)
def test_a_killed_owners_files_are_removed_and_a_living_ones_kept(tmp_path: Path) -> None:
    living, dying = start_owner(tmp_path), start_owner(tmp_path)
    try:
        before = set(tmp_path.iterdir())
        assert len(before) == 4
        assert remove_stale(tmp_path) == []
        dying.kill()
        dying.wait()
        removed = set(remove_stale(tmp_path))
        assert {path.suffix for path in removed} == {".seg", ".kv"}
        assert set(tmp_path.iterdir()) == before - removed
        assert len(removed) == 2
        (segment,) = tmp_path.glob("*.seg")
        with is_owned(segment) as owned:
            assert owned is True
    finally:
        for owner in (living, dying):
            owner.kill()
            owner.communicate()
    assert len(remove_stale(tmp_path)) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_segment_open_elsewhere_but_without_owner_is_stale(tmp_path: Path) -> None:
    control = Control(tmp_path, GEOMETRY)
    with Segment.open(control.segment.path):
        path = control.segment.path
        control._stop.set()
        control._beating.join()
        control.arena.close()
        control.segment.close()
        assert path in remove_stale(tmp_path)


def test_an_arena_without_segment_is_stale(tmp_path: Path) -> None:
    (tmp_path / "moe-lens-1-2.kv").touch()
    (tmp_path / "somebody-elses.kv").touch()
    assert remove_stale(tmp_path) == [tmp_path / "moe-lens-1-2.kv"]
    assert [path.name for path in tmp_path.iterdir()] == ["somebody-elses.kv"]


def test_an_empty_file_of_that_name_is_stale(tmp_path: Path) -> None:
    # An owner killed between making the file and taking its lock.
    (tmp_path / "moe-lens-1-2.seg").touch()
    assert remove_stale(tmp_path) == [tmp_path / "moe-lens-1-2.seg"]


def test_an_owner_whose_new_file_is_cleaned_away_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real_open, cleaned = os.open, []

    def open_then_clean(path: Path, *arguments: int) -> int:
        fd = real_open(path, *arguments)
        if not cleaned:
            cleaned.append(path)
            assert remove_stale(tmp_path) == [path]
        return fd

    monkeypatch.setattr("native.segment.os.open", open_then_clean)
    with Segment.create(tmp_path, GEOMETRY, 5) as segment:
        assert cleaned
        assert cleaned[0] != segment.path
        assert segment.path.exists()
        monkeypatch.undo()
        assert remove_stale(tmp_path) == []
