"""`moe-lens up`: a model served by four child processes until a signal comes."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.stack_options import StackOptions, default_server
from protos.options import ServingSecurity, with_options

app = typer.Typer(add_completion=False)


@app.command("up")
@with_options(StackOptions, ServingSecurity)
def up(
    stack: StackOptions,
    security: ServingSecurity,
    model: Annotated[
        Path, typer.Option(help="The checkpoint's directory.", envvar="MOE_LENS_MODEL")
    ],
    listen: Annotated[
        str | None,
        typer.Option(
            help="unix:/path or host:port; by default a socket that only you can reach.",
            envvar="MOE_LENS_LISTEN",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model; prints `ready ADDRESS` once a token can be generated."""
    from gateway.commands import run_command

    run_command("up", _up(stack, security, model, listen))


async def _up(
    options: StackOptions, security: ServingSecurity, model: Path, listen: str | None
) -> int:
    from gateway.launcher import Stack
    from protos.transport import check_address

    address = check_address(listen or default_server())
    security.config("up", address, 0.0)  # says here what is wrong with it
    config = options.stack(model, address, show_logs=True)
    async with Stack(config.with_flags("gateway", security.flags())) as stack:
        print(f"ready {stack.address}", flush=True)
        await stack.until_stopped()
    return 0
