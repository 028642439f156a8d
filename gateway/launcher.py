"""The four services of one machine as child processes: started together, stopped without a trace.

Sockets lie in a private directory. Each child holds the reading end of a pipe whose other end is
here: when this process dies, however it dies, they stop by themselves. A child that dies or hangs
is started again, after a pause that grows as long as it cannot serve; the gateway refuses then.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from gateway.child import POLL_PERIOD_S, Child
from gateway.runtime_dir import RuntimeDirectory, remove_stale
from gateway.tokenizer import Tokenizer
from planner.spec import ModelSpec
from protos.transport import channel, is_serving

log = structlog.get_logger("launcher")

STOP_TIMEOUT_S = 20.0
HUNG_AFTER_S = 8.0


class StackError(Exception):
    """The services cannot run; says which one failed and what it said."""


@dataclass(frozen=True)
class StackConfig:
    """What to start. `options` are further flags by service name, passed on as they are."""

    model: Path
    listen: str | None = None  # of the gateway; None: a socket in the private directory
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    show_logs: bool = True  # on standard error; otherwise in files that are removed at the end
    hung_after_s: float = HUNG_AFTER_S  # a service that gives no answer for so long is replaced

    def with_flags(self, service: str, flags: Sequence[str]) -> "StackConfig":
        """With further flags for one service."""
        options = {**self.options, service: (*self.options.get(service, ()), *flags)}
        return replace(self, options=options)


class Stack:
    """`async with Stack(config) as stack:` runs the services; `stack.address` is the gateway's.

    Entering raises StackError, with nothing left running, when a service cannot start.
    """

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        for stale in remove_stale():
            log.warning("removed what a dead launcher left", path=str(stale))
        self._runtime = RuntimeDirectory()
        self._directory = self._runtime.path
        self._lifeline: tuple[int, int] | None = None
        self._children: list[Child] = []
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where the gateway listens."""
        return self.config.listen or self._socket("gateway")

    @property
    def planner(self) -> str:
        """Where the planner listens."""
        return self._socket("planner")

    @property
    def gpu_worker(self) -> str:
        """Where the GPU worker listens."""
        return self._socket("gpu_worker")

    @property
    def worker_address(self) -> str:
        """Where the GPU worker listens."""
        return self._socket("gpu_worker")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service name."""
        return {c.name: c.process.pid for c in self._children if c.process is not None}

    @property
    def exit_statuses(self) -> dict[str, int | None]:
        """By service name; 0 after an orderly stop, None while it runs."""
        return {c.name: c.exit_status for c in self._children}

    async def __aenter__(self) -> Self:
        try:
            check_model(self.config.model)
            self._lifeline = os.pipe()
            self._children = self._make_children()
            for child in self._children:
                child.start(self.config.environment, self._lifeline[0])
            await self._until_ready()
        except BaseException:
            await self._stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError, StackError):
                await self._supervisor
        await self._stop()

    async def until_stopped(self) -> None:
        """Return when this task is cancelled; the services are looked after until then."""
        assert self._supervisor is not None
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self._supervisor)

    def _make_children(self) -> list[Child]:
        """In the order in which they are stopped: who uses another before it."""
        planner, gpu_worker, cpu_worker = self.planner, self.gpu_worker, self._socket("cpu_worker")
        model = str(self.config.model)
        worker = ["--cpu-worker", cpu_worker, "--model", model]
        public = ["--planner", planner, "--gpu-worker", gpu_worker, "--model", model]
        listen = ["--listen", self.address]
        if self.config.listen is not None:
            listen += ["--local-listen", self._socket("gateway")]
        commands = {
            "gateway": ["gateway", *listen, *public],
            "gpu-worker": ["gpu-worker", "--listen", gpu_worker, *worker],
            "cpu-worker": ["cpu-worker", "--listen", cpu_worker],
            "planner": ["planner", "serve", "--listen", planner],
        }
        return [self._child(name, command) for name, command in commands.items()]

    def _child(self, name: str, command: list[str]) -> Child:
        return Child(
            name,
            [*command, *self.config.options.get(name, ())],
            self._socket(name.replace("-", "_")),
            None if self.config.show_logs else self._directory / f"{name}.log",
            self.config.hung_after_s,
        )

    async def _until_ready(self) -> None:
        """Until the planner and the gateway serve, which means that a token came out of it."""
        for name in ("planner", "gateway"):
            async with channel(self._socket(name)) as peer:
                while not await is_serving(peer, timeout_s=1.0):
                    self._check_alive()
                    await asyncio.sleep(POLL_PERIOD_S)

    def _socket(self, name: str) -> str:
        return f"unix:{self._directory}/{name}.sock"

    def _check_alive(self) -> None:
        for child in self._children:
            if child.exit_status is not None:
                words = child.last_words()
                raise StackError(
                    f"the {child.name} ended with status {child.exit_status}"
                    + (f":\n{words}" if words else "; its log is above")
                )

    async def _supervise(self) -> None:
        """Look after all children, each on its own."""
        async with asyncio.TaskGroup() as tasks:
            for child in self._children:
                tasks.create_task(self._look_after(child))

    async def _look_after(self, child: Child) -> None:
        """Start it again whenever it died or hangs."""
        assert self._lifeline is not None
        while True:
            reason = await child.until_lost()
            child.kill_group()  # what it left behind, and itself if it hangs
            delay_s = child.restart_delay_s()
            log.warning("service lost", service=child.name, reason=reason, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)
            try:
                child.start(self.config.environment, self._lifeline[0])
            except OSError as error:  # no memory, no process ids: later perhaps
                log.error("service cannot be started", service=child.name, error=str(error))

    async def _stop(self) -> None:
        try:
            for child in self._children:
                await child.stop(STOP_TIMEOUT_S)
        finally:
            for child in self._children:
                child.kill_group()
            for descriptor in self._lifeline or ():
                os.close(descriptor)
            self._lifeline = None
            self._runtime.remove()


def check_model(directory: Path) -> None:
    """Refuse a directory without a usable configuration or tokenizer before anything starts.

    Raises StackError naming the file; the GPU worker checks the weights themselves.
    """
    if not directory.is_dir():
        raise StackError(f"--model {directory}: no such directory; expected a checkpoint's")
    try:
        ModelSpec.from_directory(directory)
        Tokenizer.from_directory(directory)
    except ValueError as error:
        raise StackError(f"--model {directory}: {error}") from error
