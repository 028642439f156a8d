"""`moe-lens batch`: answer a file of requests, resume after any kill."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from gateway.batch.records import Done, OutputCorrupt, OutputInUse, RecordFile
from gateway.batch.runner import Progress, Runner, RunnerConfig, ServerLost
from gateway.batch.source import count_rows, read_lines
from gateway.stack_options import StackOptions
from protos.options import with_options

if TYPE_CHECKING:
    from moelens.client import AsyncClient
    from moelens.v1 import gateway_pb2 as messages

app = typer.Typer(add_completion=False)

# Exit statuses beside 0 (every row answered), 2 (bad arguments) and 130 (interrupted).
ABORTED = 1  # the server or the output was lost; the same command resumes
SOME_FAILED = 3
ALL_FAILED = 4


@app.command("batch")
@with_options(StackOptions)
def batch(
    stack: StackOptions,
    input_path: Annotated[
        str, typer.Option("--input", "-i", help="JSONL in OpenAI's Batch format; - for stdin.")
    ],
    output_path: Annotated[
        str, typer.Option("--output", "-o", help="Where records go (resumed if there); - stdout.")
    ],
    server: Annotated[
        str | None,
        typer.Option(
            help="unix:/path or host:port; by default where `moe-lens up` listens.",
            envvar="MOE_LENS_SERVER",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Start services for this checkpoint, and stop them afterwards."),
    ] = None,
    concurrent_rows: Annotated[
        int, typer.Option(min=1, help="Rows under way at once.")
    ] = RunnerConfig.concurrent_rows,
    patience_s: Annotated[
        float, typer.Option(min=0, help="How long the server may be away before giving up.")
    ] = RunnerConfig.patience_s,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token.", envvar="MOE_LENS_TOKEN_FILE"),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="PEM of the server's authority.", envvar="MOE_LENS_TLS_CA"),
    ] = None,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Answer every row of a JSONL file. Exit status: 0 all answered, 3 some rows failed, 4 all rows
    failed, 1 the server or the output was lost (the same command goes on from there)."""
    from gateway.commands import run_command

    config = RunnerConfig(concurrent_rows, patience_s)
    security = (token_file, tls_ca)
    run = _batch(stack, server, model, input_path, output_path, config, security, quiet)
    run_command("batch", run)


class StreamRecords:
    """Records to standard output: nothing to resume from."""

    def __init__(self) -> None:
        self.done = Done()

    def append(self, records: list[dict[str, Any]]) -> None:
        """Print and flush."""
        for record in records:
            sys.stdout.write(json.dumps(record) + "\n")
            self.done.add(record)
        sys.stdout.flush()


class ClientBackend:
    """Generates over a connection."""

    def __init__(self, client: "AsyncClient") -> None:
        self._client = client

    def generate(
        self, request: "messages.GenerateRequest"
    ) -> AsyncIterator["messages.GenerateResponse"]:
        """Events of one request."""
        return self._client.responses(request)

    async def token_text(self, token_id: int) -> str:
        """Text of a single token."""
        return await self._client.detokenize([token_id])


async def _batch(
    stack: StackOptions,
    server: str | None,
    model: Path | None,
    source: str,
    output: str,
    config: RunnerConfig,
    security: tuple[Path | None, Path | None],
    quiet: bool,
) -> int:
    from moelens.client import AsyncClient, Security

    from gateway.batch.manifest import Manifest, manifest_path
    from gateway.batch.progress import shown_progress
    from gateway.reach import reached_server

    token_file, ca = security
    token = token_file.read_text().strip() if token_file else None
    manifest_file = None if output == "-" else manifest_path(Path(output))
    with _opened(source) as file, _records(output) as records:
        total = None if source == "-" else await asyncio.to_thread(count_rows, Path(source))
        async with (
            reached_server(stack, server, model) as address,
            AsyncClient(address, Security(ca=ca, token=token)) as client,
        ):
            served = await client.model()
            manifest = Manifest(source, output, address, served.model)
            if manifest_file:
                manifest.begin(manifest_file)
            runner = Runner(ClientBackend(client), records, config)
            status, problem = "done", ""
            try:
                async with shown_progress(runner, client, total, manifest, quiet):
                    await runner.run(read_lines(file))
            except (ServerLost, OSError) as error:
                status, problem = "failed", str(error)
            except asyncio.CancelledError:
                status = "interrupted"
                raise
            finally:
                manifest.succeeded_rows = records.done.succeeded
                manifest.failed_rows = records.done.failed
                if manifest_file:
                    with contextlib.suppress(OSError):  # a full disk was reported already
                        manifest.finish(manifest_file, runner.progress, status, problem)
    _summary(runner.progress, records.done, problem)
    return _exit_status(records.done, problem)


@contextlib.contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    if source == "-":
        yield sys.stdin.buffer
        return
    with Path(source).open("rb") as file:
        yield file


@contextlib.contextmanager
def _records(output: str) -> Iterator[RecordFile | StreamRecords]:
    if output == "-":
        yield StreamRecords()
        return
    try:
        file = RecordFile(Path(output))
    except (OutputInUse, OutputCorrupt) as error:
        raise ValueError(str(error)) from error
    with file as records:
        yield records


def _summary(progress: Progress, done: Done, problem: str) -> None:
    """One line for people, on standard error."""
    resumed = f", {progress.resumed} from earlier" if progress.resumed else ""
    line = (
        f"{done.succeeded} rows answered, {done.failed} failed{resumed}; "
        f"{progress.generated_tokens} tokens generated in {progress.elapsed_s:.1f} s"
    )
    if problem:
        line += f"{os.linesep}stopped early: {problem} (run the same command again to resume)"
    print(line, file=sys.stderr)


def _exit_status(done: Done, problem: str) -> int:
    if problem:
        return ABORTED
    if not done.failed:
        return 0
    return SOME_FAILED if done.succeeded else ALL_FAILED
