"""Servers that tests start as a user would: `moe-lens up` as a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_MODEL = REPOSITORY / "demo" / "model"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Up:
    """`moe-lens up` with the demo model; `address` is the gateway's."""

    def __init__(self, address: str, log: Path, flags: Sequence[str] = ()) -> None:
        self.address = address
        self.log = log
        command = [sys.executable, "-m", "gateway.cli", "up", "--listen", address]
        if not any(flag.startswith("--model") for flag in flags):
            command += ["--model", str(DEMO_MODEL)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=REPOSITORY,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return once it said so; AssertionError with its log's end if it ended instead."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline = time.monotonic() + START_TIMEOUT_S
        said = b""
        while b"ready " not in said:
            said += self.process.stdout.read() or b""
            ended = self.process.poll() is not None or time.monotonic() > deadline
            assert not ended, self.log.read_text()[-3000:]
            time.sleep(0.05)

    @property
    def directory(self) -> Path:
        """Where its services' sockets lie: the one that its log speaks of."""
        log = self.log.read_text()
        (found,) = {
            path.parent
            for path in Path(tempfile.gettempdir()).glob("moe-lens-*/gpu_worker.sock")
            if str(path.parent) in log
        }
        return found

    def stop(self) -> int:
        """Stop as ^C does; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill -9 of it and of everything that it started."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(ancestor: int) -> Iterator[int]:
    """Living processes that a process started, and those that they did."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if path.name.isdecimal():
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(path.name))
    pending = list(children.get(ancestor, ()))
    while pending:
        pid = pending.pop()
        yield pid
        pending += children.get(pid, ())


@contextlib.contextmanager
def up(directory: Path, *flags: str, address: str | None = None) -> Iterator[Up]:
    """A server that is ready, on a TCP port of its own unless told otherwise."""
    server = Up(address or f"127.0.0.1:{free_port()}", directory / "up.log", flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def environment(name: str, *packages: str) -> Path:
    """The Python of a virtual environment with nothing but these packages; made once."""
    directory = REPOSITORY / "build" / "environments" / name
    python = directory / "bin" / "python"
    wanted = "\n".join(packages)
    stamp = directory / "packages"
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        stamp.write_text(wanted)
    return python
