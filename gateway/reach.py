"""The server that a command asks: one that runs, or one that lives as long as the command."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from gateway.launcher import Stack
from gateway.stack_options import StackOptions, default_server
from protos.transport import check_address


@contextlib.asynccontextmanager
async def reached_server(
    options: StackOptions, server: str | None, model: Path | None
) -> AsyncIterator[str]:
    """Its address. With a model, the services are started and stopped again; StackError when
    they cannot run, ValueError for an address that is none."""
    if model is None:
        yield check_address(server or default_server())
        return
    async with Stack(options.stack(model, None, show_logs=False)) as stack:
        yield stack.address
