import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from moelens.v1 import gateway_pb2 as messages

from gateway.batch.calls import BatchCalls
from gateway.batch.jobs import BatchJobs, BatchLimits, Job
from gateway.batch.runner import RunnerConfig
from protos.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)


class Slow:
    """Answers every prompt with itself, after a while."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    async def generate(
        self, request: messages.GenerateRequest
    ) -> AsyncIterator[messages.GenerateResponse]:
        await asyncio.sleep(self.pause_s)
        yield messages.GenerateResponse(started=messages.Started(model="m", prompt_tokens=1))
        yield messages.GenerateResponse(tokens=messages.Tokens(text=request.text, token_ids=[1]))
        finished = messages.Finished(reason=messages.FINISH_REASON_LENGTH)
        yield messages.GenerateResponse(finished=finished)

    async def token_text(self, token_id: int) -> str:
        return "x"


def rows(count: int) -> bytes:
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}
        for i in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def pieces(data: bytes, size: int = 37) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


class Calls(BatchCalls):
    def __init__(self, jobs: BatchJobs) -> None:
        self.jobs = jobs


async def watched(jobs: BatchJobs, batch_id: str, skip: int = 0) -> tuple[list[str], int]:
    """Records received and the last state."""
    request = messages.WatchBatchRequest(batch_id=batch_id, records=True, skip_records=skip)
    found, state = [], 0
    async for event in Calls(jobs).WatchBatch(request, None):  # type: ignore[arg-type]
        if event.WhichOneof("event") == "record_json":
            found.append(json.loads(event.record_json)["custom_id"])
        else:
            state = event.progress.state
    return found, state


def test_a_submitted_batch_is_answered_and_watched(tmp_path: Path) -> None:
    async def run() -> None:
        jobs = BatchJobs(tmp_path, Slow())
        job = await jobs.submit("", pieces(rows(20)))
        found, state = await watched(jobs, job.batch_id)
        assert sorted(found) == sorted(f"r{i}" for i in range(20))
        assert state == messages.BATCH_STATE_COMPLETED
        assert jobs.get(job.batch_id).message().succeeded_rows == 20
        again, _ = await watched(jobs, job.batch_id, skip=15)
        assert again == found[15:]
        await jobs.close()

    asyncio.run(run())


def test_a_new_process_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    limits = BatchLimits(runner=RunnerConfig(concurrent_rows=2))

    async def first() -> int:
        jobs = BatchJobs(tmp_path, Slow(0.01), limits)
        job = await jobs.submit("mine", pieces(rows(40)))
        while job.succeeded_rows < 5:
            await asyncio.wait_for(job.changed.wait(), 10)
            job.changed.clear()
        await jobs.close()
        return job.succeeded_rows

    async def second() -> None:
        jobs = BatchJobs(tmp_path, Slow(), limits)
        assert jobs.get("mine").succeeded_rows == before
        jobs.resume()
        found, state = await watched(jobs, "mine")
        assert sorted(found) == sorted(f"r{i}" for i in range(40))
        assert state == messages.BATCH_STATE_COMPLETED
        await jobs.close()

    before = asyncio.run(first())
    assert before < 40
    asyncio.run(second())


def test_cancelling_stops_for_good(tmp_path: Path) -> None:
    async def run() -> None:
        jobs = BatchJobs(tmp_path, Slow(60))
        job = await jobs.submit("mine", pieces(rows(4)))
        await asyncio.sleep(0.01)
        assert (await jobs.cancel("mine")).state == "cancelled"
        assert (await jobs.cancel("mine")).state == "cancelled"
        assert job.task is not None
        assert job.task.done()
        await jobs.close()
        restarted = BatchJobs(tmp_path, Slow())
        restarted.resume()
        assert restarted.get("mine").task is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("batch_id", "data", "error"),
    [
        ("../up", rows(1), InvalidArgument),
        (".hidden", rows(1), InvalidArgument),
        ("empty", b"\n\n", InvalidArgument),
        ("many", rows(11), ResourceExhausted),
        ("large", b"x" * 3001, ResourceExhausted),
        ("taken", rows(1), AlreadyExists),
    ],
)
def test_what_cannot_be_taken_leaves_nothing(
    tmp_path: Path, batch_id: str, data: bytes, error: type[Exception]
) -> None:
    async def run() -> None:
        jobs = BatchJobs(tmp_path, Slow(), BatchLimits(max_rows=10, max_bytes=3000))
        await jobs.submit("taken", pieces(rows(1)))
        with pytest.raises(error):
            await jobs.submit(batch_id, pieces(data))
        await jobs.close()

    asyncio.run(run())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_unknown_batches_and_servers_without_batches_say_so() -> None:
    async def run() -> None:
        jobs = BatchJobs(None, Slow())
        with pytest.raises(NotFound):
            jobs.get("x")
        with pytest.raises(FailedPrecondition):
            await jobs.submit("x", pieces(rows(1)))

    asyncio.run(run())


def test_batch_whose_beginning_cannot_be_saved_fails_instead_of_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Job, directory: Path | None = None) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        jobs = BatchJobs(tmp_path, Slow())
        job = await jobs.submit("mine", pieces(rows(4)))
        monkeypatch.setattr(Job, "save", full)
        assert job.task is not None
        await asyncio.wait_for(job.task, 10)
        assert job.state == "failed"
        assert "No space left" in job.problem
        await jobs.close()

    asyncio.run(run())
