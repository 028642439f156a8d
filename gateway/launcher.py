"""The four services of one machine as child processes: started together, stopped without a trace.

Sockets lie in a private directory. Each child holds the reading end of a pipe whose other end is
here: when this process dies, however it dies, they stop by themselves. A child that dies is started
again; one that keeps dying brings everything down.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import structlog

from gateway.tokenizer import Tokenizer
from planner.spec import ModelSpec
from protos.options import ServingSecurity
from protos.serving import LIFELINE_VARIABLE
from protos.transport import channel, is_serving

log = structlog.get_logger("launcher")

POLL_PERIOD_S = 0.05
STOP_TIMEOUT_S = 20.0
# So many deaths of one child within this time, and it is not started again.
MAX_DEATHS, DEATHS_WINDOW_S = 5, 60.0
RESTART_DELAY_S = 0.2
LOG_TAIL_LINES = 20


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

    def with_flags(self, service: str, flags: Sequence[str]) -> "StackConfig":
        """With further flags for one service."""
        options = {**self.options, service: (*self.options.get(service, ()), *flags)}
        return replace(self, options=options)


class Child:
    """One service's process, in a group of its own so that a terminal's ^C reaches only us."""

    def __init__(self, name: str, arguments: Sequence[str], directory: Path, show_logs: bool):
        self.name = name
        self.arguments = tuple(arguments)
        self.log_path = None if show_logs else directory / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.deaths: deque[float] = deque()

    def start(self, environment: dict[str, str], lifeline: int) -> None:
        """Start it, or start it again."""
        command = [sys.executable, "-m", "gateway.cli", *self.arguments]
        output: IO[bytes] | None = self.log_path.open("ab") if self.log_path else None
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output or sys.stderr,
                stderr=output or sys.stderr,
                env={**_inherited(), **environment, LIFELINE_VARIABLE: str(lifeline)},
                pass_fds=[lifeline],
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self.process.poll() if self.process else None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """End it and whatever it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end, insist after `timeout_s`, and leave nothing of its group."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.until_ended()
        self.kill_group()

    async def until_ended(self) -> None:
        """Return when the process is gone, or was never there."""
        while self.process is not None and self.process.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_PERIOD_S)

    def last_words(self) -> str:
        """The end of its log, where that is a file."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        spoken = [line for line in lines if not line.startswith("{")] or lines
        return "\n".join(spoken[-LOG_TAIL_LINES:])

    def may_start_again(self) -> bool:
        """Count a death; False when there were too many."""
        now = time.monotonic()
        self.deaths.append(now)
        while now - self.deaths[0] > DEATHS_WINDOW_S:
            self.deaths.popleft()
        return len(self.deaths) <= MAX_DEATHS


class Stack:
    """`async with Stack(config) as stack:` runs the services; `stack.address` is the gateway's.

    Entering raises StackError, with nothing left running, when a service cannot start.
    """

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        self._directory = Path(tempfile.mkdtemp(prefix="moe-lens-"))  # mode 0700
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
    def pids(self) -> dict[str, int]:
        """Process ids by service name."""
        return {c.name: c.process.pid for c in self._children if c.process is not None}

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
        """Return when this task is cancelled; StackError when a service keeps dying."""
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
        return [
            Child(
                name,
                [*command, *self.config.options.get(name, ())],
                self._directory,
                self.config.show_logs,
            )
            for name, command in commands.items()
        ]

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
        """Start again what has died."""
        assert self._lifeline is not None
        while True:
            for child in self._children:
                if child.exit_status is None:
                    continue
                log.warning("service died", service=child.name, status=child.exit_status)
                child.kill_group()  # what it left behind
                if not child.may_start_again():
                    raise StackError(
                        f"the {child.name} died {MAX_DEATHS + 1} times within "
                        f"{DEATHS_WINDOW_S:.0f} s\n{child.last_words()}".rstrip()
                    )
                await asyncio.sleep(RESTART_DELAY_S)
                child.start(self.config.environment, self._lifeline[0])
            await asyncio.sleep(POLL_PERIOD_S)

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
            shutil.rmtree(self._directory, ignore_errors=True)


def _inherited() -> dict[str, str]:
    """Our environment, less what concerns the public address alone (it travels as flags)."""
    return {
        name: value for name, value in os.environ.items() if name not in ServingSecurity.variables()
    }


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
