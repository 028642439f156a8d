"""Streams that nobody reads any more: what they held is free within one step.

Steps are slow here (the weights cross an emulated link), so that a step is long against everything
else: the metrics show how many steps passed until the KV cache and the slots were free.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc
import pytest
from moelens.client import Client, request

from tests.servers import REPOSITORY, Up, free_port, up

STREAMS = 6
# What is under way when the client leaves, and the one that was planned ahead of its result.
MOST_STEPS = 2
STEP_S = 0.5  # 25 MB of weights over 50 MB/s
TIMEOUT_S = 60.0
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}

# A client process that streams for ever and says when each stream has its first token.
READER = r"""
import os, sys, threading
from moelens.client import Client

def read(number):
    with Client(sys.argv[1]) as client:
        for event in client.stream(f"Citizen {number}:", max_tokens=400, ignore_eos=True):
            os.write(1, b"token\n")

for number in range(int(sys.argv[2])):
    threading.Thread(target=read, args=(number,)).start()
"""


@dataclass(frozen=True)
class Seen:
    """The metrics at one moment."""

    running: int
    waiting: int
    kv_share: float
    steps: int
    generated: int

    @property
    def idle(self) -> bool:
        """Nothing is held."""
        return self.running == self.waiting == 0 and self.kv_share == 0


@dataclass
class Server:
    """A server with slow steps, and its metrics."""

    up: Up
    metrics: str

    def look(self) -> Seen:
        """The metrics now."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as page:
            text = page.read().decode()

        def value(name: str) -> float:
            match = re.search(rf"^moe_lens_{name} (\S+)$", text, re.MULTILINE)
            assert match is not None, name
            return float(match[1])

        return Seen(
            int(value("num_requests_running")),
            int(value("num_requests_waiting")),
            value("kv_cache_usage_perc"),
            int(value("iteration_tokens_total_count")),
            int(value("generation_tokens_total")),
        )

    def wait(self, condition: Callable[[Seen], bool]) -> Seen:
        """Look until it holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(seen := self.look()):
            assert time.monotonic() < deadline, seen
            time.sleep(0.01)
        return seen


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    metrics = f"127.0.0.1:{free_port()}"
    link = ["--emulate-link-gb-per-s=0.05", "--resident=0"]
    flags = ["--kv=64MB", f"--metrics-listen={metrics}", *link]
    with up(tmp_path_factory.mktemp("abandoned"), *flags) as running:
        yield Server(running, metrics)


@contextmanager
def all_free_within_a_step(server: Server) -> Iterator[None]:
    """The streams end inside; before they do, every one of them runs."""
    before = server.wait(lambda seen: seen.running == STREAMS)
    assert before.kv_share > 0
    yield
    left = server.look()
    free = server.wait(lambda seen: seen.idle)
    assert free.steps - left.steps <= 1
    time.sleep((MOST_STEPS + 2) * STEP_S)  # and nobody goes on with them
    later = server.look()
    assert later.idle
    assert later.steps - left.steps <= MOST_STEPS
    assert later.generated == free.generated


@contextmanager
def streams(server: Server, timeout_s: float | None = None) -> Iterator[list[grpc.Call]]:
    """Calls that have had a token each."""
    with ExitStack() as stack:
        calls = []
        for number in range(STREAMS):
            client = stack.enter_context(Client(server.up.address))
            message = request(f"Citizen {number}:", request_id=f"r{number}", **LONG)  # type: ignore[arg-type]
            calls.append(client.stub.Generate(message, timeout=timeout_s))
        for call in calls:
            while next(call).WhichOneof("event") != "tokens":
                pass
        yield calls


def test_cancelled_streams(server: Server) -> None:
    with streams(server) as calls, all_free_within_a_step(server):
        for call in calls:
            call.cancel()


def test_aborted_requests(server: Server) -> None:
    with (
        streams(server) as calls,
        all_free_within_a_step(server),
        Client(server.up.address) as client,
    ):
        assert all(client.abort(f"r{number}") for number in range(STREAMS))
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]


def test_passed_deadlines(server: Server) -> None:
    with streams(server, timeout_s=6.0) as calls, all_free_within_a_step(server):
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]


def test_a_client_killed_in_the_middle(server: Server) -> None:
    command = [sys.executable, "-c", READER, server.up.address, str(STREAMS)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY)
    try:
        assert reader.stdout is not None
        for _ in range(2 * STREAMS):
            assert reader.stdout.readline() == b"token\n"
        with all_free_within_a_step(server):
            os.kill(reader.pid, signal.SIGKILL)
            reader.wait()
    finally:
        reader.kill()
        reader.wait()


def test_the_freed_place_is_used(server: Server) -> None:
    with Client(server.up.address) as client:
        (completion,) = client.generate("ROMEO:", max_tokens=3, temperature=0.0)
        assert completion.generated_tokens == 3
    assert server.wait(lambda seen: seen.idle).kv_share == 0
