import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from moelens.v1 import gateway_pb2 as messages

from gateway.batch.records import RecordFile
from gateway.batch.runner import Runner, RunnerConfig, ServerLost
from gateway.batch.source import Line, count_rows, read_lines
from protos.errors import InvalidArgument, ResourceExhausted, Unavailable


class Echo:
    """Answers a text prompt with its reverse, one token a character; fails as told."""

    def __init__(self, troubles: int = 0, always_away: bool = False) -> None:
        self.troubles = troubles
        self.always_away = always_away
        self.running = 0
        self.peak = 0
        self.priorities: set[int] = set()
        self.request_ids: list[str] = []

    async def generate(
        self, request: messages.GenerateRequest
    ) -> AsyncIterator[messages.GenerateResponse]:
        self.request_ids.append(request.request_id)
        self.priorities.add(request.priority)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            yield messages.GenerateResponse(
                started=messages.Started(model="echo", prompt_tokens=len(request.text))
            )
            await asyncio.sleep(0)
            if request.text == "poison":
                raise InvalidArgument("is poison", field="text")
            for position, character in enumerate(reversed(request.text)):
                if self.troubles and position == 1:
                    self.troubles -= 1
                    if self.always_away or self.troubles % 2:
                        raise Unavailable("away", retry_after_s=0.001)
                    raise ResourceExhausted("full", retry_after_s=0.001)
                tokens = messages.Tokens(text=character, token_ids=[ord(character)])
                yield messages.GenerateResponse(tokens=tokens)
            finished = messages.Finished(reason=messages.FINISH_REASON_STOP)
            yield messages.GenerateResponse(finished=finished)
        finally:
            self.running -= 1

    async def token_text(self, token_id: int) -> str:
        return chr(token_id)


def row(custom_id: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 50}
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": body})


async def lines(texts: list[str]) -> AsyncIterator[Line]:
    for number, text in enumerate(texts, 1):
        yield Line(number, text.encode())


def run(backend: Echo, out: Path, texts: list[str], **settings: float) -> Runner:
    async def inner() -> Runner:
        with RecordFile(out) as records:
            runner = Runner(backend, records, RunnerConfig(**settings))  # type: ignore[arg-type]
            await runner.run(lines(texts))
            return runner

    return asyncio.run(inner())


def by_id(out: Path) -> dict[str | None, dict[str, object]]:
    records = [json.loads(line) for line in out.open()]
    assert all(count == 1 for key, count in Counter(r["custom_id"] for r in records).items() if key)
    return {r["custom_id"]: r for r in records}


def test_every_row_is_answered_once_through_troubles(tmp_path: Path) -> None:
    out, backend = tmp_path / "out.jsonl", Echo(troubles=30)
    runner = run(backend, out, [row(f"r{i}", f"text{i}") for i in range(100)], concurrent_rows=8)
    answers = by_id(out)
    assert len(answers) == 100
    body = answers["r7"]["response"]["body"]  # type: ignore[index]
    assert body["choices"][0]["text"] == "7txet"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert backend.peak <= 8
    assert backend.priorities == {messages.PRIORITY_BATCH}
    assert len(set(backend.request_ids)) == len(backend.request_ids)
    assert runner.progress.generated_tokens == sum(len(f"text{i}") for i in range(100))


def test_faulty_rows_get_error_objects_and_do_not_stop_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    texts = [row("a", "x"), "{", row("b", "poison"), row("a", "again"), row("c", "y")]
    run(Echo(), out, texts)
    records = [json.loads(line) for line in out.open()]
    errors = {r["error"]["line"]: r for r in records if r["error"]}
    assert {line: r["error"]["code"] for line, r in errors.items()} == {
        2: "invalid_json",
        3: "invalid_argument",
        4: "duplicate_custom_id",
    }
    assert errors[3]["error"]["param"] == "text"
    assert errors[4]["custom_id"] is None
    assert {r["custom_id"] for r in records if not r["error"]} == {"a", "c"}


def test_a_resumed_run_gives_what_an_undisturbed_one_gives(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    texts = [row(f"r{i}", f"t{i}") if i % 5 else "{" for i in range(60)]
    texts += [row("r1", "duplicate")]
    run(Echo(), whole, texts)
    source = random.Random(3)
    for count in (10, 35, 61):
        run(Echo(), parts, texts[:count])
        data = parts.read_bytes()
        parts.write_bytes(data[: len(data) - source.randrange(200)])
    run(Echo(), parts, texts)

    def content(path: Path) -> list[str]:
        records = [json.loads(line) for line in path.open()]
        for record in records:
            if record["response"]:
                record["response"]["body"]["created"] = record["response"]["request_id"] = 0
        return sorted(json.dumps(record) for record in records)

    assert content(parts) == content(whole)


def test_a_server_that_stays_away_ends_the_run_with_what_was_done(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ServerLost):
        run(
            Echo(troubles=10**6, always_away=True),
            out,
            [row("a", "x"), row("b", "long")],
            patience_s=0.01,
        )
    assert set(by_id(out)) == {"a"}


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    class Full:
        def __init__(self, inner: RecordFile) -> None:
            self.done = inner.done

        def append(self, records: list[dict[str, object]]) -> None:
            raise OSError(28, "No space left on device")

    async def inner() -> None:
        with RecordFile(tmp_path / "out.jsonl") as records:
            await Runner(Echo(), Full(records)).run(lines([row("a", "x")] * 3))

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(inner())


def test_lines_are_read_and_counted_with_and_without_a_last_newline(tmp_path: Path) -> None:
    async def read(path: Path) -> list[Line]:
        with path.open("rb") as file:
            return [line async for line in read_lines(file)]

    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n\nb\nc")
    assert [line.number for line in asyncio.run(read(path))] == [1, 3, 4]
    assert count_rows(path) == 3
    path.write_bytes(b"x" * (16 * 2**20 + 2) + b"\nb\n")
    first, second = asyncio.run(read(path))
    assert first.fault
    assert (second.number, second.data) == (2, b"b\n")
