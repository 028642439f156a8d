import json
import os
from pathlib import Path

import pytest

from gateway.batch.records import OutputCorrupt, OutputInUse, RecordFile, failure, key_of, success


def record(name: str) -> dict[str, object]:
    return success(f"id-{name}", name, "request", {"text": "é\u2028\n"})


def test_records_survive_closing_and_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path) as records:
        records.append([record("a"), failure("id-b", "b", 2, "code", "message", "field")])
        records.append([failure("id-3", None, 3, "invalid_json", "message", "")])
    with RecordFile(path) as records:
        assert records.done.custom_ids == {key_of("a"), key_of("b")}
        assert records.done.lines == {3}
        assert (records.done.succeeded, records.done.failed) == (1, 2)
    assert [json.loads(line)["custom_id"] for line in path.open()] == ["a", "b", None]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path) as records:
        records.append([record("a"), record("b")])
    os.truncate(path, path.stat().st_size - cut)
    with RecordFile(path) as records:
        assert records.done.custom_ids == {key_of("a")}
        records.append([record("b")])
    assert [json.loads(line)["custom_id"] for line in path.open()] == ["a", "b"]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"custom_id": "a"}\n{"x": 1}\n')
    with pytest.raises(OutputCorrupt, match="line 1"):
        RecordFile(path)
    assert path.read_text() == '{"custom_id": "a"}\n{"x": 1}\n'


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path), pytest.raises(OutputInUse):
        RecordFile(path)
    RecordFile(path).close()
