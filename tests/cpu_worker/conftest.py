"""A CPU worker as its own process, and a way to see what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from moelens.v1 import cpu_worker_pb2, cpu_worker_pb2_grpc

REQUEST: dict[str, Any] = {
    "n_layers": 2,
    "n_q_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "kv_dtype": "fp32",
    "kv_blocks": 256,
    "max_sequences": 16,
    "max_context_tokens": 2048,
    "max_slot_tokens": 256,
    "scale": 32**-0.5,
    "peer_timeout_s": 1.0,
}


def request(**changes: Any) -> cpu_worker_pb2.ConfigureRequest:
    """A small request that is right but for `changes`."""
    return cpu_worker_pb2.ConfigureRequest(**REQUEST | changes)


def until(condition: Callable[[], bool], within_s: float) -> None:
    """Wait for a condition; fail when it does not come true in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process of that id exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Worker:
    """`moe-lens cpu-worker` as a process, its socket and shared memory in `directory`."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.shm = directory / "shm"
        self.shm.mkdir(exist_ok=True)
        self.socket = directory / "worker.sock"
        address = f"unix:{self.socket}"
        command = ["cpu_worker.cli", "--listen", address, "--shm-dir", str(self.shm), *options]
        self.process = subprocess.Popen([sys.executable, "-m", *command])
        self.channel = grpc.insecure_channel(address)
        self.stub = cpu_worker_pb2_grpc.CpuWorkerStub(self.channel)
        self.pids: list[int] = []
        health = health_pb2_grpc.HealthStub(self.channel)
        until(lambda: self._is_serving(health), within_s=30)

    @staticmethod
    def _is_serving(health: Any) -> bool:
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def configure(self, **changes: Any) -> cpu_worker_pb2.ConfigureResponse:
        """Configure, and remember the processes that it started."""
        response = self.stub.Configure(request(**changes), timeout=60)
        self.pids = [process.pid for process in self.stats().processes]
        assert all(runs(pid) for pid in self.pids)
        return response

    def stats(self) -> cpu_worker_pb2.StatsResponse:
        return self.stub.Stats(cpu_worker_pb2.StatsRequest(), timeout=10)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.shm.iterdir())

    def assert_nothing_left(self) -> None:
        until(lambda: not any(runs(pid) for pid in self.pids), within_s=2)
        until(lambda: self.files() == [], within_s=2)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        status = self.process.wait(timeout=20)
        self.channel.close()
        return status

    def end(self) -> None:
        for pid in self.pids:
            if runs(pid):
                os.kill(pid, signal.SIGCONT)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.channel.close()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers; none outlives the test."""
    started: list[Worker] = []

    def start(*options: str) -> Worker:
        started.append(Worker(tmp_path, *(options or ("--attention-processes", "2"))))
        return started[-1]

    yield start
    for worker in started:
        worker.end()


@pytest.fixture
def worker(start_worker: Callable[..., Worker]) -> Worker:
    """One with two attention processes."""
    return start_worker()
