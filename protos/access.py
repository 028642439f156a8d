"""Who may call: bearer tokens from a file, and how much each may have under way.

The file has a line for each client, `name token`; blank lines and lines that begin with # are
left out. It is read again when it changes. Only hashes of the tokens are kept, every one of them is
compared in constant time, and neither tokens nor hashes are ever logged.
"""

import contextlib
import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from protos.errors import ResourceExhausted, Unauthenticated

log = structlog.get_logger("access")

MIN_TOKEN_CHARACTERS = 16
_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})\s+(?P<token>[!-~]+)")


class AccessError(ValueError):
    """The token file is unusable; says the line, never its content."""


class Access:
    """Admits calls by their `authorization` metadata.

    `max_calls` bounds the calls that one token has under way (None: no bound).
    """

    def __init__(self, path: Path, max_calls: int | None = None) -> None:
        """Raises AccessError, OSError."""
        if max_calls is not None and max_calls < 1:
            raise AccessError(f"max_calls_per_token is {max_calls}; expected 1 or more")
        self._path = path
        self._max_calls = max_calls
        self._stamp = _stamp(path)
        self._clients = read_tokens(path)
        self._under_way: Counter[str] = Counter()

    @contextlib.contextmanager
    def call(self, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[str]:
        """The name of the caller, for as long as its call lasts.

        Raises Unauthenticated, and ResourceExhausted with a time to retry.
        """
        name = self._name(metadata)
        if self._max_calls is not None and self._under_way[name] >= self._max_calls:
            raise ResourceExhausted(
                f"this token has {self._max_calls} calls under way, which is all it may have",
                reason="TOO_MANY_CALLS",
                retry_after_s=1.0,
            )
        self._under_way[name] += 1
        try:
            yield name
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    def _name(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        self._refresh()
        given = next((value for key, value in metadata if key == "authorization"), None)
        if not isinstance(given, str) or not given.startswith("Bearer "):
            raise Unauthenticated(
                "a token is needed: authorization: Bearer TOKEN", reason="TOKEN_MISSING"
            )
        digest = _digest(given.removeprefix("Bearer ").strip())
        found = None
        for known, name in self._clients.items():
            if hmac.compare_digest(known, digest):
                found = name  # no early end: time tells nothing
        if found is None:
            raise Unauthenticated("the token is not known here", reason="TOKEN_UNKNOWN")
        return found

    def _refresh(self) -> None:
        """Tokens of a file that changed; an unusable one leaves those of before in force."""
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._clients = read_tokens(self._path)
                log.info("tokens read again", clients=len(self._clients))
        except (OSError, AccessError) as error:
            log.error("the token file is unusable, the last one stays in force", error=str(error))


def read_tokens(path: Path) -> dict[bytes, str]:
    """Hash of each token, and whose it is. Raises AccessError, OSError."""
    clients: dict[bytes, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise AccessError(f"{path}, line {number}: expected a name and a token")
        if len(match["token"]) < MIN_TOKEN_CHARACTERS:
            raise AccessError(
                f"{path}, line {number}: the token has fewer than {MIN_TOKEN_CHARACTERS} characters"
            )
        digest = _digest(match["token"])
        if digest in clients or match["name"] in clients.values():
            raise AccessError(f"{path}, line {number}: the name or the token was there before")
        clients[digest] = match["name"]
    if not clients:
        raise AccessError(f"{path} has no token")
    return clients


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
