"""How our commands run something asynchronous: one place for signals and for what they print."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import grpc
import typer
import uvloop
from moelens.client import RequestFailed

from gateway.launcher import StackError
from protos.logs import set_up_logs

INTERRUPTED = 130
NO_SERVER = "Is a server running? Start one with: moe-lens up --model DIR"


def run_command(name: str, main: Coroutine[Any, Any, int]) -> None:
    """Run to the end and exit with its status. SIGINT and SIGTERM cancel it, so that whatever it
    started is stopped; errors that a user can act on are printed in one piece."""
    set_up_logs(name)
    try:
        status = uvloop.run(_with_signals(main))
    except (StackError, OSError, ValueError) as error:
        print(f"moe-lens {name}: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except RequestFailed as error:
        hint = ""
        if error.code is grpc.StatusCode.UNAVAILABLE:
            hint = f"\n{NO_SERVER}"
        print(f"moe-lens {name}: {error}{hint}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(status)


async def _with_signals(main: Coroutine[Any, Any, int]) -> int:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await task
