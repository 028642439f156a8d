"""The released smg gateway in front of our server: OpenAI-style HTTP, and two of ours behind one.

About 25 s, most of it the second server's start and smg's checks of its workers.
"""

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import DEMO_MODEL, Up, environment, free_port, up

HERE = Path(__file__).parent
PACKAGES = ("smg==1.13.0", "openai==3.57.0")


@contextlib.contextmanager
def smg(python: Path, log: Path, *workers: str) -> Iterator[str]:
    """The gateway in front of these workers; yields its base URL once it answers."""
    port = free_port()
    urls = [f"grpc://{worker}" for worker in workers]
    command = [python.parent / "smg", "launch", "--backend", "vllm", "--worker-urls", *urls]
    command += ["--model-path", DEMO_MODEL, "--port", str(port), "--prometheus-port"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, str(free_port())], stdout=file, stderr=file)
    try:
        _wait_for(f"http://127.0.0.1:{port}/v1/completions", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None
        with contextlib.suppress(urllib.error.URLError, OSError):
            _complete(url)
            return
        assert time.monotonic() < deadline
        time.sleep(0.3)


def _complete(url: str) -> str:
    body = {"model": "model", "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return str(json.load(response)["choices"][0]["text"])


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("smg", *PACKAGES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("first"), "--kv=64MB") as running:
        yield running


def test_openai_client_through_smg_streaming_and_not(
    tmp_path: Path, python: Path, server: Up
) -> None:
    with smg(python, tmp_path / "smg.log", server.address) as url:
        done = subprocess.run(
            [python, HERE / "openai_client.py", url, "model"],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["completion"]
    assert answer["completion_streamed"] == answer["completion"]
    assert answer["completion_tokens"] == 12
    assert answer["chat"]
    assert answer["chat_streamed"] == answer["chat"]
    assert answer["chat_finish_reason"] in ("stop", "length")


def test_requests_go_on_when_one_of_two_servers_is_killed(
    tmp_path: Path, python: Path, server: Up
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    with (
        up(second, "--kv=64MB") as doomed,
        smg(python, tmp_path / "smg.log", server.address, doomed.address) as url,
    ):
        before = {_complete(f"{url}/completions") for _ in range(6)}
        doomed.kill()
        after = [_retried(f"{url}/completions") for _ in range(10)]
    assert len(before) == 1
    assert set(after) == before


def _retried(url: str) -> str:
    """As OpenAI's client does: the request that meets the death itself may fail once or twice."""
    for attempt in range(5):
        try:
            return _complete(url)
        except (urllib.error.URLError, OSError):
            if attempt == 4:
                raise
            time.sleep(0.5 * 2**attempt)
    raise AssertionError
