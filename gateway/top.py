"""`moe-lens top`: a running server at a glance, live."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moelens.v1.gateway_pb2 import GetLoadResponse
    from rich.table import Table

app = typer.Typer(add_completion=False)


@app.command("top")
def top(
    server: Annotated[
        str | None,
        typer.Option(
            help="unix:/path or host:port; by default where `moe-lens up` listens.",
            envvar="MOE_LENS_SERVER",
            show_default=False,
        ),
    ] = None,
    period_s: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
) -> None:
    """Watch a running server: requests, KV, tokens per second predicted and actual, the limit."""
    from gateway.commands import run_command
    from gateway.stack_options import default_server

    run_command("top", _top(server or default_server(), period_s, once))


async def _top(server: str, period_s: float, once: bool) -> int:
    from moelens.client import AsyncClient
    from rich.console import Console
    from rich.live import Live

    async with AsyncClient(server) as client:
        model = (await client.model()).model
        if once or not sys.stdout.isatty():
            Console().print(screen(model, await client.load()))
            return 0
        with Live(auto_refresh=False) as live:
            while True:
                live.update(screen(model, await client.load()), refresh=True)
                await asyncio.sleep(period_s)


def screen(model: str, load: "GetLoadResponse") -> "Table":
    """One look."""
    from rich.table import Table

    table = Table(title=f"{model}, up {load.uptime_s:,.0f} s", show_header=False)
    kv_share = load.kv_used_tokens / max(load.kv_capacity_tokens, 1)
    rows = [
        ("running, waiting", f"{load.running:,}, {load.waiting:,}"),
        ("wait of a new request", f"{load.queue_wait_s:.1f} s"),
        ("KV cache", f"{load.kv_used_tokens:,} of {load.kv_capacity_tokens:,} ({kv_share:.0%})"),
        ("tokens/s, actual", _rates(load.tokens_per_s, load.generated_tokens_per_s)),
        (
            "tokens/s, predicted",
            _rates(load.predicted_tokens_per_s, load.predicted_generated_tokens_per_s)
            if load.HasField("predicted_tokens_per_s")
            else "not known",
        ),
        ("limited by", load.limit or "not known"),
        ("preemptions", f"{load.preemptions:,}"),
        ("recoveries", f"{load.recoveries:,}"),
        ("state", "ready" if load.ready else "out of order"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _rates(tokens_per_s: float, generated_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} ({generated_per_s:,.0f} generated)"
