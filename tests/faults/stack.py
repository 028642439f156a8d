"""The services under test in a process of their own: `python -m tests.faults.stack CONFIG.json`.

As `moe-lens up`, with flags and variables of each service that `up` does not offer.
"""

import json
import sys
from pathlib import Path
from typing import Any

from gateway.commands import run_command
from gateway.launcher import Stack, StackConfig


async def _run(settings: dict[str, Any]) -> int:
    config = StackConfig(
        model=Path(settings["model"]),
        listen=settings["listen"],
        options={name: tuple(flags) for name, flags in settings["options"].items()},
        environment=settings["environment"],
    )
    async with Stack(config) as stack:
        print("ready", flush=True)
        await stack.until_stopped()
    return 0


if __name__ == "__main__":
    run_command("stack", _run(json.loads(Path(sys.argv[1]).read_text())))
