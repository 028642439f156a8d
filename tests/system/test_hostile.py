"""Every kind of bad input against a real server, while good requests run."""

import threading
from collections.abc import Iterator

import grpc
import pytest
from moelens.client import Client

from protos.errors import Failure, decode_failure
from tests.servers import Up, up
from tests.system.hostile import Hostile, everything

PROMPTS = [f"Citizen {number}:" for number in range(8)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("hostile")
    flags = ["--kv=64MB", "--dtype=fp32", f"--batch-dir={directory / 'batches'}"]
    with up(directory, *flags) as running:
        yield running


def send(channel: grpc.Channel, call: Hostile) -> Failure:
    """The failure that a call ends with."""
    rpc = getattr(channel, call.kind)(f"/{call.method}")
    argument = iter([call.data]) if call.kind.startswith("stream") else call.data
    with pytest.raises(grpc.RpcError) as caught:
        answer = rpc(argument, timeout=60)
        if call.kind.endswith("stream"):
            list(answer)
    return decode_failure(caught.value)


def test_there_are_sixty_kinds() -> None:
    names = [f"{call.method} {call.name}" for call in everything()]
    assert len(set(names)) == len(names) >= 60


def test_each_is_refused_by_field_and_good_requests_never_notice(server: Up) -> None:
    def good(client: Client) -> list[str]:
        options = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
        return [client.generate(prompt, **options)[0].text for prompt in PROMPTS]  # type: ignore[arg-type]

    outcomes: list[list[str]] = []
    wrong = []
    with Client(server.address) as client:
        alone = good(client)
        stop = threading.Event()

        def traffic() -> None:
            while not stop.is_set():
                outcomes.append(good(client))

        thread = threading.Thread(target=traffic)
        thread.start()
        try:
            with grpc.insecure_channel(server.address, SEND_ANYTHING) as channel:
                for call in everything():
                    failure = send(channel, call)
                    if failure.code is not call.code or failure.field != (call.field or ""):
                        wrong.append((call.name, failure.code.name, failure.field, failure.message))
        finally:
            stop.set()
            thread.join()
        assert client.load().kv_used_tokens == 0
    assert not wrong
    assert outcomes
    assert all(outcome == alone for outcome in outcomes)
    assert "bug" not in server.log.read_text()


SEND_ANYTHING = [("grpc.max_send_message_length", -1)]


def test_worker_sockets_are_for_their_owner_alone(server: Up) -> None:
    directory = server.directory
    assert directory.stat().st_mode & 0o077 == 0
    for name in ("gpu_worker.sock", "cpu_worker.sock", "planner.sock"):
        assert (directory / name).stat().st_mode & 0o077 == 0
