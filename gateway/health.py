"""`moe-lens health ADDRESS`: for health checks of containers and scripts."""

import asyncio
import sys
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command("health")
def health(
    address: Annotated[str, typer.Argument(help="unix:/path or host:port")],
    service: Annotated[
        str, typer.Option(help="Full name of one service; by default all that it has.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="For the answer.")] = 2.0,
) -> None:
    """Exit with 0 when the service serves, with 1 when it does not or cannot be reached."""
    from protos.transport import channel, is_serving

    async def ask() -> bool:
        async with channel(address) as peer:
            return await is_serving(peer, service, timeout_s)

    try:
        serving = asyncio.run(ask())
    except ValueError as error:
        print(f"moe-lens health: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    print("SERVING" if serving else "NOT_SERVING")
    raise typer.Exit(0 if serving else 1)
