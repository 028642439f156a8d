"""Batches that the server keeps: taken once, finished whatever restarts in between.

One directory for each batch: `input.jsonl`, `output.jsonl` (the records, which are also what is
done) and `state.json`. It gets its name when it is complete.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import structlog
from moelens.v1 import gateway_pb2 as messages

from gateway.batch.records import OutputCorrupt, OutputInUse, RecordFile
from gateway.batch.runner import Backend, Progress, Runner, RunnerConfig, ServerLost
from gateway.batch.source import count_rows, read_lines
from protos.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)

log = structlog.get_logger("batch")

State = Literal["queued", "running", "completed", "failed", "cancelled"]
STATES = {
    "queued": messages.BATCH_STATE_QUEUED,
    "running": messages.BATCH_STATE_RUNNING,
    "completed": messages.BATCH_STATE_COMPLETED,
    "failed": messages.BATCH_STATE_FAILED,
    "cancelled": messages.BATCH_STATE_CANCELLED,
}
ENDED = ("completed", "failed", "cancelled")
BATCH_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
WATCH_PERIOD_S = 0.5
ARRIVING = ".arriving-"  # a directory whose batch is not complete


@dataclass(frozen=True)
class BatchLimits:
    """What one server takes. Batches run one after the other, each with many rows at once."""

    max_rows: int = 1_000_000
    max_bytes: int = 4 * 2**30
    max_batches: int = 10_000
    runner: RunnerConfig = field(default_factory=lambda: RunnerConfig(patience_s=float("inf")))


@dataclass
class Job:
    """One batch; `state`, `problem` and `total_rows` are on the disk, the rest follows."""

    batch_id: str
    directory: Path
    total_rows: int = 0
    state: State = "queued"
    problem: str = ""
    succeeded_rows: int = 0
    failed_rows: int = 0
    progress: Progress | None = None
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def input(self) -> Path:
        """The rows."""
        return self.directory / "input.jsonl"

    @property
    def output(self) -> Path:
        """The records."""
        return self.directory / "output.jsonl"

    def save(self, directory: Path | None = None) -> None:
        """Have the state on the disk."""
        directory = directory or self.directory
        content = {"state": self.state, "problem": self.problem, "total_rows": self.total_rows}
        temporary = directory / "state.json.tmp"
        with temporary.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / "state.json")
        self.changed.set()

    def message(self) -> messages.BatchProgress:
        """As clients see it."""
        progress = self.progress
        message = messages.BatchProgress(
            batch_id=self.batch_id,
            state=STATES[self.state],
            total_rows=self.total_rows,
            succeeded_rows=self.succeeded_rows,
            failed_rows=self.failed_rows,
            problem=self.problem,
        )
        if progress is not None:
            message.prompt_tokens = progress.prompt_tokens
            message.generated_tokens = progress.generated_tokens
            message.tokens_per_s = progress.tokens_per_s
            message.elapsed_s = progress.elapsed_s
        return message


class BatchJobs:
    """All batches below one directory. `directory` None: this server keeps none."""

    def __init__(
        self, directory: Path | None, backend: Backend, limits: BatchLimits | None = None
    ) -> None:
        self._directory = directory
        self._backend = backend
        self._limits = limits or BatchLimits()
        self._jobs: dict[str, Job] = {}
        self._turn = asyncio.Lock()
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._jobs = {job.batch_id: job for job in _found(directory)}

    def resume(self) -> None:
        """Take up what an earlier process left unfinished."""
        for job in self._jobs.values():
            if job.state not in ENDED and job.task is None:
                job.task = asyncio.create_task(self._run(job))

    async def close(self) -> None:
        """Stop working; what is unfinished stays so, for the next process."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get(self, batch_id: str) -> Job:
        """NotFound when there is none."""
        if batch_id not in self._jobs:
            raise NotFound(f"{batch_id[:64]!r} is no batch of this server", field="batch_id")
        return self._jobs[batch_id]

    async def submit(self, batch_id: str, pieces: AsyncIterator[bytes]) -> Job:
        """Take a batch; see SubmitBatch in gateway.proto for what it raises."""
        directory = self._directory
        if directory is None:
            raise FailedPrecondition("this server keeps no batches; start it with --batch-dir")
        job = self._new(batch_id, directory)
        arriving = directory / f"{ARRIVING}{secrets.token_hex(8)}"
        try:
            arriving.mkdir(mode=0o700)
            await self._receive(arriving / "input.jsonl", pieces)
            job.total_rows = await asyncio.to_thread(self._counted, arriving / "input.jsonl")
            if job.batch_id in self._jobs or job.directory.exists():
                raise AlreadyExists(f"{job.batch_id!r} is taken", field="batch_id")
            job.save(arriving)
            arriving.rename(job.directory)
            self._jobs[job.batch_id] = job
        except OSError as error:
            raise ResourceExhausted(f"the batch cannot be kept: {error.strerror}") from error
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
        job.task = asyncio.create_task(self._run(job))
        log.info("batch taken", batch_id=job.batch_id, rows=job.total_rows)
        return job

    async def cancel(self, batch_id: str) -> Job:
        """Stop a batch for good; its last records are written when this returns."""
        job = self.get(batch_id)
        if job.state not in ENDED:
            job.state = "cancelled"
            job.save()
            if job.task is not None:
                job.task.cancel()
                await asyncio.wait([job.task])
        return job

    async def watch(self, job: Job) -> AsyncIterator[Job]:
        """Yield whenever it changed, at most twice a second, the last time when it has ended."""
        while True:
            job.changed.clear()
            ended = job.state in ENDED and (job.task is None or job.task.done())
            yield job
            if ended:
                return
            await asyncio.sleep(WATCH_PERIOD_S)
            waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(job.changed.wait())]
            if job.task is not None and not job.task.done():
                waiting.append(asyncio.ensure_future(asyncio.wait([job.task])))
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for future in waiting:
                    future.cancel()

    def _new(self, batch_id: str, directory: Path) -> Job:
        batch_id = batch_id or f"batch-{secrets.token_hex(8)}"
        if not BATCH_ID.fullmatch(batch_id):
            raise InvalidArgument(
                "must be 1 to 64 letters, digits, '-', '_' or '.', not starting with '.'",
                field="batch_id",
            )
        if batch_id in self._jobs:
            raise AlreadyExists(f"{batch_id!r} is taken", field="batch_id")
        if len(self._jobs) >= self._limits.max_batches:
            raise ResourceExhausted(f"this server keeps {self._limits.max_batches} batches")
        return Job(batch_id, directory / batch_id)

    async def _receive(self, path: Path, pieces: AsyncIterator[bytes]) -> None:
        size_bytes = 0
        with path.open("wb") as file:
            async for piece in pieces:
                size_bytes += len(piece)
                if size_bytes > self._limits.max_bytes:
                    raise ResourceExhausted(
                        f"is larger than the {self._limits.max_bytes} bytes of a batch",
                        field="jsonl",
                    )
                await asyncio.to_thread(file.write, piece)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())

    def _counted(self, path: Path) -> int:
        rows = count_rows(path)
        if rows == 0:
            raise InvalidArgument("has no rows", field="jsonl")
        if rows > self._limits.max_rows:
            raise ResourceExhausted(
                f"has {rows} rows; this server takes {self._limits.max_rows}", field="jsonl"
            )
        return rows

    async def _run(self, job: Job) -> None:
        """Work on a batch when its turn comes; other failures than its own leave it unfinished."""
        async with self._turn:
            job.state = "running"
            try:
                job.save()
                await self._answer(job)
                job.state = "completed"
            except (OSError, OutputCorrupt, OutputInUse, ServerLost) as error:
                job.state, job.problem = "failed", str(error)
                log.warning("batch failed", batch_id=job.batch_id, problem=job.problem)
            with contextlib.suppress(OSError):  # a full disk: found unfinished, and resumed
                job.save()
            job.changed.set()  # saved or not
        log.info("batch ended", batch_id=job.batch_id, state=job.state)

    async def _answer(self, job: Job) -> None:
        with RecordFile(job.output) as records, job.input.open("rb") as file:

            def observe() -> None:
                done = records.done
                job.succeeded_rows, job.failed_rows = done.succeeded, done.failed
                job.changed.set()

            runner = Runner(self._backend, records, self._limits.runner, on_progress=observe)
            job.progress = runner.progress
            observe()
            try:
                await runner.run(read_lines(file))
            finally:
                observe()


def _found(directory: Path) -> list[Job]:
    """Batches of earlier processes; leftovers of submissions that never ended are removed."""
    jobs = []
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(ARRIVING):
            shutil.rmtree(entry, ignore_errors=True)
        if not (entry / "state.json").is_file():
            continue
        content = json.loads((entry / "state.json").read_text())
        job = Job(entry.name, entry, content["total_rows"], content["state"], content["problem"])
        if job.output.exists():
            with RecordFile(job.output) as records:
                done = records.done
                job.succeeded_rows, job.failed_rows = done.succeeded, done.failed
        jobs.append(job)
    return jobs
