"""Runs the rows of a batch: many at once, each answered or failed exactly once, in any order.

Used by `moe-lens batch` over a connection and by the gateway itself for submitted batches.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import structlog
from moelens.client import RequestFailed
from moelens.v1 import gateway_pb2 as messages

from gateway.batch.answer import Collected, record_id, response_body
from gateway.batch.body import RowError
from gateway.batch.records import Done, failure, key_of, success
from gateway.batch.rows import Row, parse_row
from gateway.batch.source import Line
from protos.errors import ServiceError

log = structlog.get_logger("batch")

# Statuses that pass: the same request may succeed later.
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0


class Backend(Protocol):
    """Whatever generates."""

    def generate(
        self, request: messages.GenerateRequest
    ) -> AsyncIterator[messages.GenerateResponse]:
        """Events of one request; raises RequestFailed (a client) or ServiceError (in process)."""
        ...

    async def token_text(self, token_id: int) -> str:
        """Text of a single token."""
        ...


class Records(Protocol):
    """Where records go."""

    done: Done

    def append(self, records: list[dict[str, Any]]) -> None:
        """Have them written when this returns. Called from a thread."""
        ...


class ServerLost(Exception):
    """The server was away for longer than the runner waits."""


@dataclass(frozen=True)
class RunnerConfig:
    """Bounds of a run."""

    concurrent_rows: int = 512
    # How long the server may be away before the run ends; a later run resumes.
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        if self.concurrent_rows < 1:
            raise ValueError(f"concurrent_rows is {self.concurrent_rows}; expected 1 or more")


@dataclass
class Progress:
    """Where a run stands. Rows found in the output on start count as `resumed`."""

    resumed: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int:
        """Rows that this run finished."""
        return self.succeeded + self.failed

    @property
    def elapsed_s(self) -> float:
        """Since the run's start."""
        return time.monotonic() - self.started_at

    @property
    def tokens_per_s(self) -> float:
        """Prompt and generated tokens."""
        return (self.prompt_tokens + self.generated_tokens) / max(self.elapsed_s, 1e-9)


class Runner:
    """One run over a source of lines."""

    def __init__(
        self,
        backend: Backend,
        records: Records,
        config: RunnerConfig = RunnerConfig(),  # frozen
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.progress = Progress()
        self._backend = backend
        self._records = records
        self._config = config
        self._on_progress = on_progress
        self._seen: dict[int, int] = {}  # key of each custom_id to the line that has it
        self._finished: list[dict[str, Any]] = []
        self._unwritten = asyncio.Event()
        self._closing = False
        self._nonce = secrets.token_hex(6)
        self._texts: dict[int, str] = {}

    async def run(self, lines: AsyncIterator[Line]) -> Progress:
        """Answer every line. Raises ServerLost, OSError (output); what was finished is written."""
        writer = asyncio.create_task(self._write())
        lock = asyncio.Lock()
        workers = [
            asyncio.create_task(self._work(lines, lock))
            for _ in range(self._config.concurrent_rows)
        ]
        rows: asyncio.Future[list[None]] = asyncio.gather(*workers)
        either: set[asyncio.Future[Any]] = {rows, writer}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if rows.done():
                rows.result()
        finally:
            rows.cancel()
            await asyncio.wait(workers)
            self._closing = True
            self._unwritten.set()
            await writer
        return self.progress

    async def _work(self, lines: AsyncIterator[Line], lock: asyncio.Lock) -> None:
        """Take lines until there are none; one reader at a time."""
        while True:
            async with lock:
                line = await anext(lines, None)
                row = self._claim(line) if line is not None else None
            if line is None:
                return
            if row is not None:
                self._finish(await self._answer(row))

    def _claim(self, line: Line) -> Row | None:
        """The row of a line that is still to be answered; a faulty line is finished here."""
        try:
            if line.fault:
                raise RowError("", line.fault, code="row_too_large")
            row = parse_row(line.number, line.data)
            self._check_unique(row.custom_id, line.number)
        except RowError as error:
            self._fault(line.number, error)
            return None
        if key_of(row.custom_id) in self._records.done.custom_ids:
            self.progress.resumed += 1
            return None
        return row

    def _check_unique(self, custom_id: str, line: int) -> None:
        first = self._seen.setdefault(key_of(custom_id), line)
        if first != line:
            message = f"{custom_id!r} is also the id of line {first}"
            raise RowError("custom_id", message, code="duplicate_custom_id")

    def _fault(self, line: int, error: RowError) -> None:
        custom_id = error.custom_id
        if custom_id is not None:
            try:
                self._check_unique(custom_id, line)
            except RowError as duplicate:
                error, custom_id = duplicate, None
        done = self._records.done
        known = line in done.lines if custom_id is None else key_of(custom_id) in done.custom_ids
        if known:
            self.progress.resumed += 1
            return
        name = custom_id if custom_id is not None else f"line {line}"
        record = failure(record_id(name), custom_id, line, error.code, str(error), error.param)
        self._finish(record)

    async def _answer(self, row: Row) -> dict[str, Any]:
        """The record of a row, whatever happens to it short of losing the server."""
        try:
            collected = [
                await self._generate(request, f"batch-{self._nonce}-{row.line}-{index}")
                for index, request in enumerate(row.requests)
            ]
        except (RequestFailed, ServiceError) as error:
            code = error.reason.lower() or error.code.name.lower()
            return failure(
                record_id(row.custom_id), row.custom_id, row.line, code, error.message, error.field
            )
        texts = await self._token_texts(collected)
        self.progress.prompt_tokens += sum(entry.prompt_tokens for entry in collected)
        body = response_body(row, collected, texts, int(time.time()))
        request_id = f"batch-{self._nonce}-{row.line}"
        return success(record_id(row.custom_id), row.custom_id, request_id, body)

    async def _generate(self, request: messages.GenerateRequest, request_id: str) -> Collected:
        """One prompt's outputs; tried again while the server is away or its queue is full.

        Raises what the server refuses it with, ServerLost."""
        request.priority = messages.PRIORITY_BATCH
        attempt, away_since = 0, None
        while True:
            request.request_id = f"{request_id}-{attempt}"
            collected = Collected()
            try:
                async for event in self._backend.generate(request):
                    self.progress.generated_tokens += collected.take(event)
                return collected
            except (RequestFailed, ServiceError) as error:
                # Tokens of an attempt that failed do not count: they come again.
                self.progress.generated_tokens -= collected.generated_tokens
                problem = error
            attempt += 1
            full = problem.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            if problem.code not in PASSING and not (full and problem.retry_after_s is not None):
                raise problem
            now = time.monotonic()
            away_since = None if full else away_since or now
            if away_since is not None and now - away_since > self._config.patience_s:
                raise ServerLost(problem.message)
            backoff_s = min(FIRST_RETRY_S * 2 ** min(attempt - 1, 8), LONGEST_RETRY_S)
            await asyncio.sleep(min(problem.retry_after_s or backoff_s, LONGEST_RETRY_S))

    async def _token_texts(self, collected: Sequence[Collected]) -> dict[int, str]:
        for entry in collected:
            for token_id in entry.logprob_ids():
                if token_id not in self._texts:
                    self._texts[token_id] = await self._backend.token_text(token_id)
        return self._texts

    def _finish(self, record: dict[str, Any]) -> None:
        if record["error"] is None:
            self.progress.succeeded += 1
        else:
            self.progress.failed += 1
        self._finished.append(record)
        self._unwritten.set()
        self._on_progress()

    async def _write(self) -> None:
        """Everything that finished since the last write goes out in one append."""
        while not self._closing or self._finished:
            await self._unwritten.wait()
            self._unwritten.clear()
            records, self._finished = self._finished, []
            if records:
                await asyncio.to_thread(self._records.append, records)
