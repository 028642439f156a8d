"""`moelens generate`: text from prompts, all submitted at once, printed in their order."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.stack_options import StackOptions
from protos.options import with_options

if TYPE_CHECKING:
    from moelens.client import AsyncClient, Completion, Event

app = typer.Typer(add_completion=False)

DEFAULT_MAX_TOKENS = 128


@app.command("generate")
@with_options(StackOptions)
def generate(
    stack: StackOptions,
    prompts: Annotated[
        list[str],
        typer.Argument(help="Prompts; - reads one a line from standard input.", metavar="PROMPT…"),
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
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = (
        DEFAULT_MAX_TOKENS
    ),
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token; higher is more varied.")
    ] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus, 0 to 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens to keep.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the best's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats an output that was drawn.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Do not stop at end of sequence.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each prompt, in order.")
    ] = False,
) -> None:
    """Generate text and stream it."""
    from gateway.commands import run_command

    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if server is not None and model is not None and "MOE_LENS_SERVER" not in os.environ:
        raise typer.BadParameter("give --server or --model, not both")
    texts = _read_prompts(prompts)
    run_command("generate", _generate(stack, server, model, texts, given, as_json))


def _read_prompts(arguments: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for argument in arguments:
        texts += sys.stdin.read().splitlines() if argument == "-" else [argument]
    if not texts:
        raise typer.BadParameter("standard input has no prompt")
    return texts


async def _generate(
    stack: StackOptions,
    server: str | None,
    model: Path | None,
    prompts: list[str],
    options: dict[str, Any],
    as_json: bool,
) -> int:
    from moelens.client import AsyncClient

    from gateway.reach import reached_server

    async with (
        reached_server(stack, server, model) as address,
        AsyncClient(address) as client,
    ):
        results = [Result(prompt) for prompt in prompts]
        tasks = [asyncio.create_task(result.run(client, options)) for result in results]
        try:
            for result in results:
                await (print_json if as_json else print_text)(result, several=len(results) > 1)
        except BrokenPipeError:  # nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return 1 if any(result.error for result in results) else 0


@dataclass
class Problem:
    """Why a prompt has no output."""

    code: str
    message: str
    field: str


class Result:
    """One prompt: its pieces of text as they come, then its completion or its problem."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self.completion: Completion | None = None
        self.error: Problem | None = None
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()

    async def run(self, client: "AsyncClient", options: dict[str, Any]) -> None:
        """Ask, again after a while when the server is full."""
        from moelens.client import RequestFailed

        try:
            while True:
                try:
                    await self._ask(client, options)
                    return
                except RequestFailed as error:
                    if error.retry_after_s is None or error.code.name != "RESOURCE_EXHAUSTED":
                        self.error = Problem(error.code.name, error.message, error.field)
                        return
                    await asyncio.sleep(error.retry_after_s)
        finally:
            self._pieces.put_nowait(None)

    async def _ask(self, client: "AsyncClient", options: dict[str, Any]) -> None:
        from moelens.client import Collector, request

        collector = Collector()
        async for response in client.responses(request(self.prompt, **options)):
            event: Event | None = collector.add(response)
            if event is not None and event.text:
                self._pieces.put_nowait(event.text)
        (self.completion,) = collector.completions

    async def pieces(self) -> AsyncIterator[str]:
        """Text as it comes, until the end."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


async def print_json(result: Result, several: bool) -> None:
    """One line with everything, once it is there."""
    async for _ in result.pieces():
        pass
    print(json.dumps(_record(result), ensure_ascii=False), flush=True)


def _record(result: Result) -> dict[str, Any]:
    if result.error is not None:
        return {"error": vars(result.error)}
    completion = result.completion
    assert completion is not None
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": completion.generated_tokens,
    }


async def print_text(result: Result, several: bool) -> None:
    """The text as it comes, under its prompt if there are several."""
    write: Callable[[str], int] = sys.stdout.write
    if several:
        write(f"> {result.prompt}\n")
    async for piece in result.pieces():
        write(piece)
        sys.stdout.flush()
    if result.error is not None:
        print(f"moe-lens generate: {result.error.code}: {result.error.message}", file=sys.stderr)
        if result.error.code == "UNAVAILABLE":
            from gateway.commands import NO_SERVER

            print(NO_SERVER, file=sys.stderr)
    write("\n\n" if several else "\n")
    sys.stdout.flush()
