"""A batch of 2,000 rows through kills of its client and of the whole stack."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.servers import Up, free_port, up

ROWS = 2000
SEED = 11


def rows() -> list[str]:
    """Valid chats and completions, faulty bodies, broken JSON, and a few duplicates."""
    source = random.Random(SEED)
    lines = []
    for index in range(ROWS):
        kind = source.random()
        envelope = {"custom_id": f"row-{index}", "method": "POST", "url": "/v1/completions"}
        if kind < 0.85:
            body: dict[str, object] = {"prompt": f"Speaker {index}:", "max_tokens": 6}
        elif kind < 0.9:
            envelope["url"] = "/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": f"{index}?"}], "max_tokens": 5}
        elif kind < 0.95:
            body = {"prompt": "x", "max_tokens": source.choice([-1, "many", 10**6])}
        elif kind < 0.98:
            lines.append('{"custom_id": "row-broken", ')
            continue
        else:
            envelope["custom_id"] = f"row-{source.randrange(max(index, 1))}"
            body = {"prompt": "again", "max_tokens": 2}
        body["temperature"] = 0
        lines.append(json.dumps({**envelope, "body": body}))
    return lines


class Batch:
    """`moe-lens batch` as a process."""

    def __init__(self, address: str, rows: Path, records: Path) -> None:
        command = [sys.executable, "-m", "gateway.cli", "batch", "--server", address]
        command += ["-i", str(rows), "-o", str(records), "--patience-s", "120"]
        self.records = records
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill_after(self, count: int) -> None:
        """Kill -9 once so many records are there."""
        while self.process.poll() is None and self.count() < count:
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()

    def count(self) -> int:
        return self.records.read_bytes().count(b"\n") if self.records.exists() else 0


def content(records: Path) -> list[str]:
    """What the records say, less what names the moment."""
    found = []
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record["response"]:
            record["response"]["request_id"] = record["response"]["body"]["created"] = None
        found.append(json.dumps(record, sort_keys=True))
    return sorted(found)


@pytest.mark.timeout(600)
def test_every_row_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(rows()) + "\n")
    source = random.Random(SEED)
    moments = sorted(source.sample(range(100, ROWS - 100), 4))
    address = f"127.0.0.1:{free_port()}"
    undisturbed, disturbed = tmp_path / "undisturbed.jsonl", tmp_path / "disturbed.jsonl"
    flags = ["--kv=128MB", "--dtype=fp32"]
    with up(tmp_path, *flags, address=address):
        assert Batch(address, tmp_path / "rows.jsonl", undisturbed).process.wait(300) == 3
        for moment in moments[:2]:
            Batch(address, tmp_path / "rows.jsonl", disturbed).kill_after(moment)
    doomed = Up(address, tmp_path / "doomed.log", flags)
    doomed.wait_ready()
    batch = Batch(address, tmp_path / "rows.jsonl", disturbed)
    while batch.count() < moments[2]:
        time.sleep(0.01)
    doomed.kill()  # the whole stack, under the running client
    with up(tmp_path, *flags, address=address):
        batch.kill_after(moments[3])
        assert Batch(address, tmp_path / "rows.jsonl", disturbed).process.wait(300) == 3
    assert disturbed.read_bytes().endswith(b"\n")
    ids = Counter(json.loads(line)["custom_id"] for line in disturbed.open())
    assert all(count == 1 for custom_id, count in ids.items() if custom_id is not None)
    assert content(disturbed) == content(undisturbed)
