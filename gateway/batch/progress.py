"""The progress bar of a batch: rows, tokens per second, time left by the clock and by the plan."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from moelens.client import AsyncClient, RequestFailed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gateway.batch.manifest import Manifest
from gateway.batch.runner import Runner

PERIOD_S = 0.5
ASK_EVERY = 10  # periods between two questions to the server


@contextlib.asynccontextmanager
async def shown_progress(
    runner: Runner, client: AsyncClient, total: int | None, manifest: Manifest, quiet: bool
) -> AsyncIterator[None]:
    """Keep a bar on standard error (not when it is no terminal) and the manifest's prediction."""
    hidden = quiet or not sys.stderr.isatty()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as bar:
        task = bar.add_task("rows", total=total, state="")

        async def refresh() -> None:
            turn = 0
            while True:
                if turn % ASK_EVERY == 0:
                    with contextlib.suppress(RequestFailed):
                        load = await client.load()
                        if load.HasField("predicted_tokens_per_s"):
                            manifest.predicted_tokens_per_s = load.predicted_tokens_per_s
                done = runner.progress.resumed + runner.progress.rows
                bar.update(task, completed=done, state=_state(runner, total, manifest))
                turn += 1
                await asyncio.sleep(PERIOD_S)

        refresher = asyncio.create_task(refresh())
        try:
            yield
        finally:
            refresher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refresher


def _state(runner: Runner, total: int | None, manifest: Manifest) -> str:
    progress = runner.progress
    parts = [f"{progress.tokens_per_s:,.0f} tokens/s"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if total is not None and progress.rows:
        rows_left = max(total - progress.resumed - progress.rows, 0)
        parts.append(f"{_clock(rows_left * progress.elapsed_s / progress.rows)} left")
        tokens_per_row = (progress.prompt_tokens + progress.generated_tokens) / progress.rows
        if manifest.predicted_tokens_per_s:
            predicted_s = rows_left * tokens_per_row / manifest.predicted_tokens_per_s
            parts.append(f"{_clock(predicted_s)} predicted")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
