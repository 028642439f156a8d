"""Every command in docs/ runs as it stands there.

A block fenced as `console` is a shell script, run in an empty directory that has the repository's
`demo`; one fenced as `console background` is a server that runs until the end of its document. Of
what is fenced as `sh`, the way to an environment that has the command, the targets have to exist.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import REPOSITORY

DOCUMENTS = ("quickstart.md", "api.md", "batch.md")
BLOCK = re.compile(r"^```(console(?: background)?|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: str) -> list[tuple[str, str]]:
    """(kind, text) of each block that is to be run."""
    return BLOCK.findall((REPOSITORY / "docs" / document).read_text())


@pytest.mark.timeout(900)  # a command each, some start all services
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_a_document_succeeds(document: str, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(REPOSITORY / "demo")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)}
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for kind, text in blocks(document):
            if kind == "console background":
                servers.append(background(text, tmp_path, environment))
                continue
            command = ["bash", "-euo", "pipefail", "-c", text]
            if kind == "python":
                command = [sys.executable, "-c", text]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"{text}\n{done.stderr[-2000:]}"
    finally:
        for server in servers:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) in (0, 130)
    assert any(kind.startswith("console") for kind, _ in blocks(document))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_target_that_a_document_makes_exists(document: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    text = (REPOSITORY / "docs" / document).read_text()
    for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in (*REPOSITORY.glob("docs/*.md"), REPOSITORY / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def background(
    text: str, directory: Path, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """A server that is ready."""
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            shlex.split(text), cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    line = process.stdout.readline()
    assert line.startswith(b"ready"), (directory / "server.log").read_text()[-2000:]
    assert time.monotonic() < deadline
    return process
