"""A stack of services to be maltreated: its processes by role, its directories, its clock."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.servers import DEMO_MODEL, REPOSITORY, START_TIMEOUT_S, STOP_TIMEOUT_S

SERVICES = ("gateway", "gpu-worker", "cpu-worker", "planner")
ATTENTION = "attention"
SHM_BYTES = 512 << 20
KV = "64MiB"
CLOCK_SOURCE = Path(__file__).with_name("clock.c")


class Rig:
    """`with Rig(directory) as rig:` starts the services and waits until they are ready."""

    def __init__(
        self,
        directory: Path,
        model: Path = DEMO_MODEL,
        flags: dict[str, list[str]] | None = None,
        proxied: bool = False,
    ) -> None:
        self.directory = directory
        self.address = f"unix:{directory}/gateway.sock"
        self.proxy_path = f"{directory}/proxy.sock"
        self.batch_dir = directory / "batches"
        self.log = directory / "services.log"
        self.shm_dir = directory / "shm"
        self._model = model
        self._clock = directory / "clock"
        self._flags = flags or {}
        self._proxied = proxied
        self._process: subprocess.Popen[bytes] | None = None
        self._mounts = contextlib.ExitStack()

    def __enter__(self) -> "Rig":
        self.owns_shm = self._mount(self.shm_dir, SHM_BYTES)
        self.owns_batch_disk = self._mount(self.batch_dir, 8 << 20)
        if not self.owns_shm:
            self.shm_dir = Path("/dev/shm")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._process is not None:
                self.stop()
        finally:
            self._mounts.close()

    def _mount(self, path: Path, size_bytes: int) -> bool:
        """A file system of our own, that can be full without harm to others; needs root."""
        path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if mounted:
            self._mounts.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
        return mounted

    def _start(self) -> None:
        config = self.directory / "stack.json"
        config.write_text(json.dumps(self._settings()))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.stack", str(config)],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while b"ready" not in (self._process.stdout.read() or b""):
            ended = self._process.poll() is not None or time.monotonic() > deadline_s
            assert not ended, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def _settings(self) -> dict[str, object]:
        shm = f"--shm-dir={self.shm_dir}"
        options = {
            "gateway": [f"--batch-dir={self.batch_dir}"],
            "gpu-worker": [f"--kv={KV}", shm],
            "cpu-worker": [shm],
            "planner": [],
        }
        if self._proxied:
            options["gateway"].append(f"--gpu-worker=unix:{self.proxy_path}")
        for name, flags in self._flags.items():
            options[name] += flags
        return {
            "model": str(self._model),
            "listen": self.address,
            "options": options,
            "environment": self._clock_environment(),
        }

    def _clock_environment(self) -> dict[str, str]:
        library = self.directory / "clock.so"
        build = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK_SOURCE), "-ldl"]
        subprocess.run(build, check=True)
        self.set_clock(0)
        return {"LD_PRELOAD": str(library), "TEST_CLOCK_FILE": str(self._clock)}

    def set_clock(self, offset_s: int) -> None:
        """Move the wall clock of all services so many seconds from the true time."""
        with self._clock.open("r+b" if self._clock.exists() else "w+b") as file:
            file.write(struct.pack("=q", offset_s))

    def stop(self) -> int:
        """Stop as ^C does; returns the exit status."""
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(STOP_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    # -- processes ------------------------------------------------------------------------------

    def pids(self, role: str) -> list[int]:
        """Process ids of a service, or of the attention processes."""
        assert self._process is not None
        children = _children(self._process.pid)
        if role == ATTENTION:
            parents = [pid for pid in children if _role(pid) == "cpu-worker"]
            found = [pid for parent in parents for pid in _children(parent)]
            return [pid for pid in found if _role(pid) == ATTENTION]
        return [pid for pid in children if _role(pid) == role]

    def socket(self, role: str) -> str:
        """Path of a service's socket; OSError while it is away."""
        for pid in self.pids(role):
            arguments = _arguments(pid)
            flag = "--local-listen" if "--local-listen" in arguments else "--listen"
            return arguments[arguments.index(flag) + 1].removeprefix("unix:")
        raise FileNotFoundError(f"no {role}")

    def all_pids(self) -> list[int]:
        """All services and attention processes."""
        return [pid for role in (*SERVICES, ATTENTION) for pid in self.pids(role)]


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in path.read_text().split()]
    return found


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def _role(pid: int) -> str:
    arguments = _arguments(pid)
    if "cpu_worker.attention_process" in arguments:
        return ATTENTION
    return next((name for name in SERVICES if name in arguments[2:5]), "")


@contextlib.contextmanager
def filled(path: Path) -> Iterator[None]:
    """A file system without a free byte."""
    file = path / "full"
    chunk = bytes(1 << 20)
    try:
        with file.open("wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(chunk)
        with file.open("ab", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(b"x")
        yield
    finally:
        file.unlink()
