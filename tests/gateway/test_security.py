"""The public address with TLS, client certificates and tokens: who has none gets nowhere."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from moelens.client import Client, RequestFailed, Security

from tests.servers import REPOSITORY, Up, free_port, up

TLS = REPOSITORY / "tests" / "data" / "tls"
TOKEN = "alice-0123456789abcdef"


def pem(name: str) -> Path:
    return TLS / f"{name}.pem"


def key(name: str) -> Path:
    return TLS / f"{name}.key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("secure")
    tokens = directory / "tokens"
    tokens.write_text(f"alice {TOKEN}\n")
    flags = [
        f"--tls-certificate={pem('server')}",
        f"--tls-key={key('server')}",
        f"--tls-client-ca={pem('authority')}",
        f"--token-file={tokens}",
        "--max-calls-per-token=4",
        "--kv=64MB",
    ]
    with up(directory, *flags, address=f"localhost:{free_port()}") as running:
        yield running


def secured(name: str = "client", token: str | None = TOKEN) -> Security:
    return Security(pem("authority"), pem(name), key(name), token)


def test_certificate_and_token_together_are_let_in(server: Up) -> None:
    with Client(server.address, secured()) as client:
        assert client.generate("ROMEO:", max_tokens=4, temperature=0.0)[0].generated_tokens == 4


@pytest.mark.parametrize("token", [None, "", "wrong-0123456789abcdef", TOKEN[:-1], TOKEN + "0"])
def test_no_token_or_a_wrong_one_gets_nowhere(server: Up, token: str | None) -> None:
    calls: list[Callable[[Client], object]] = [
        lambda c: c.generate("ROMEO:", max_tokens=1),
        lambda c: c.model(),
        lambda c: c.load(),
        lambda c: c.abort("x"),
        lambda c: c.tokenize("x"),
    ]
    with Client(server.address, secured(token=token)) as client:
        for call in calls:
            with pytest.raises(RequestFailed) as caught:
                call(client)
            assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "security",
    [
        Security(pem("authority"), None, None, TOKEN),
        secured("impostor"),
        Security(pem("stranger"), pem("client"), key("client"), TOKEN),
        Security(token=TOKEN),
    ],
    ids=["no certificate", "another authority's", "server not trusted", "no TLS"],
)
def test_without_the_right_certificates_there_is_no_connection(
    server: Up, security: Security
) -> None:
    with Client(server.address, security) as client, pytest.raises(RequestFailed) as caught:
        client.model()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_calls_under_way_are_bounded_for_a_token(server: Up) -> None:
    with Client(server.address, secured()) as client:
        streams = [client.stream("A", max_tokens=400, ignore_eos=True) for _ in range(4)]
        for stream in streams:
            next(stream)
        with pytest.raises(RequestFailed) as caught:
            client.model()
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s is not None
        for stream in streams:
            stream.close()


def test_secrets_are_not_in_the_logs(server: Up) -> None:
    assert TOKEN not in server.log.read_text()
