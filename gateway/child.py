"""One supervised process: started, asked whether it lives, ended, started again.

A process is hung when it answered once and then gives no answer to two health checks in a row, each
with half of the bound as its deadline. That it does not serve just now is no matter here: a worker
that loads its model, or waits for its peer, answers.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.options import ServingSecurity
from protos.serving import LIFELINE_VARIABLE
from protos.transport import channel

POLL_PERIOD_S = 0.05
CHECK_PERIOD_S = 0.5
CHECKS_UNANSWERED = 2
# Until the first answer: imports on a busy machine. One that loads a model answers meanwhile.
START_BOUND_S = 60.0
LOG_TAIL_LINES = 20
# A process that served for so long has started well: its next death is the first one again.
STEADY_S = 5.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 30.0


class Child:
    """One service's process, in a group of its own so that a terminal's ^C reaches only us."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        socket: str,
        log_path: Path | None,
        hung_after_s: float,
    ) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.failed_starts = 0  # in a row
        self._socket = socket
        self._hung_after_s = hung_after_s
        self._started_at = 0.0
        self._serving_since: float | None = None

    def start(self, environment: dict[str, str], lifeline: int) -> None:
        """Start it, or start it again."""
        command = [sys.executable, "-m", "gateway.cli", *self.arguments]
        output: IO[bytes] | None = self.log_path.open("ab") if self.log_path else None
        self._started_at, self._serving_since = time.monotonic(), None
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

    async def until_lost(self) -> str:
        """Return why the process has to be replaced: it ended, or it hangs."""
        watch = asyncio.create_task(self._until_hung())
        ended = asyncio.create_task(self.until_ended())
        try:
            await asyncio.wait([watch, ended], return_when=asyncio.FIRST_COMPLETED)
            return watch.result() if watch.done() else f"it ended with status {self.exit_status}"
        finally:
            for task in (watch, ended):
                task.cancel()
            await asyncio.wait([watch, ended])

    async def _until_hung(self) -> str:
        """Ask for its health until it stops answering."""
        async with channel(self._socket) as peer:
            stub = health_pb2_grpc.HealthStub(peer)
            answered, unanswered = False, 0
            while True:
                serving = await self._ask(stub)
                answered = answered or serving is not None
                unanswered = 0 if serving is not None or not answered else unanswered + 1
                if serving and self._serving_since is None:
                    self._serving_since = time.monotonic()
                if unanswered >= CHECKS_UNANSWERED:
                    return f"it has not answered for {self._hung_after_s:g} s"
                if not answered and time.monotonic() - self._started_at > START_BOUND_S:
                    return f"it has not answered within {START_BOUND_S:g} s of its start"
                await asyncio.sleep(CHECK_PERIOD_S)

    async def _ask(self, stub: health_pb2_grpc.HealthStub) -> bool | None:
        """Whether it serves; None without an answer."""
        deadline_s = self._hung_after_s / CHECKS_UNANSWERED
        try:
            # Waited for: a connection refused is as good as no answer, and no sooner known.
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(), timeout=deadline_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError:
            return None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def restart_delay_s(self) -> float:
        """How long to wait before it is started again: longer with every start that failed."""
        served_s = time.monotonic() - (self._serving_since or time.monotonic())
        self.failed_starts = 0 if served_s >= STEADY_S else self.failed_starts + 1
        return min(FIRST_DELAY_S * 2.0 ** min(self.failed_starts, 16), LONGEST_DELAY_S)

    def last_words(self) -> str:
        """The end of its log, where that is a file."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        spoken = [line for line in lines if not line.startswith("{")] or lines
        return "\n".join(spoken[-LOG_TAIL_LINES:])


def _inherited() -> dict[str, str]:
    """Our environment, less what concerns the public address alone (it travels as flags)."""
    return {
        name: value for name, value in os.environ.items() if name not in ServingSecurity.variables()
    }
