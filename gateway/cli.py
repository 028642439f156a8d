"""`moe-lens`: the one command. Other services' subcommands are loaded when they are called."""

import importlib
import importlib.util
import os
import sys
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is loaded

import typer
from typer.core import TyperCommand, TyperGroup

from protos.environment import check_environment

# Subcommand → module with its `app`, and what --help says of it.
SUBCOMMANDS = {
    "up": ("gateway.up", "Serve a model: the four services on this machine."),
    "generate": ("gateway.generate", "Generate text, from a server or from a model directly."),
    "demo": ("gateway.demo", "Serve the shipped demo model, stream some text, stop."),
    "doctor": ("gateway.doctor", "What this machine has, what it means, what to change."),
    "batch": ("gateway.batch.cli", "Answer a JSONL file of requests (OpenAI Batch format)."),
    "top": ("gateway.top", "Watch a running server."),
    "plan": ("planner.cli", "How fast a model would run on a machine, and why."),
    "planner": ("planner.cli", "The same; `planner serve` is the service."),
    "gateway": ("gateway.serve", "Serve the public API (one of the four services)."),
    "gpu-worker": ("gpu_worker.cli", "Execute the steps of one model (one of the four)."),
    "cpu-worker": ("cpu_worker.cli", "Hold the KV cache, compute attention (one of the four)."),
    "profile": ("gateway.profile", "Measure this machine for the planner."),
    "bench": ("gateway.bench.cli", "Measure throughput against the planner's prediction."),
    "call": ("gateway.call", "Call any RPC of any service, known by its reflection."),
    "health": ("gateway.health", "Ask a service whether it serves; exit status 0 if so."),
}


class Deferred(TyperCommand):
    """Stands for a subcommand in --help and becomes it when it is called."""

    def __init__(self, name: str, module: str, text: str) -> None:
        super().__init__(name, callback=lambda: None, help=text)
        self._module = module

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        """Load the real command, and continue with that one's context."""
        app = importlib.import_module(self._module).app
        command = typer.main.get_command(app)
        command.name = self.name
        return command.make_context(*arguments, **keywords)


class Root(TyperGroup):
    """The subcommands above, as far as they are installed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (module, text) in SUBCOMMANDS.items():
            if _exists(module):
                self.add_command(Deferred(name, module, text))


def _exists(module: str) -> bool:
    """Whether a module can be found, without running any of it but its package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


app = typer.Typer(
    cls=Root,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Mixture-of-experts models larger than the accelerator's memory.",
)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Options of the command itself."""
    if version:
        from importlib.metadata import version as installed

        print(installed("moe-lens"))
        raise typer.Exit
    try:
        check_environment(os.environ)
    except ValueError as error:
        print(f"moe-lens: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def main() -> None:
    """Entry point."""
    app(prog_name="moe-lens")


if __name__ == "__main__":
    main()
