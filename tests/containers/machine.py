"""A Docker engine of the tests' own: dockerd, a base image by debootstrap, compose.

Needs root and Debian's docker.io, docker-compose and debootstrap (.ci/run installs them). State
lies in a directory of its own; a machine's other engine is left alone.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.servers import REPOSITORY

TOOLS = ("dockerd", "docker-compose", "debootstrap", "iptables")
BASE_IMAGE, IMAGE = "moe-lens-base:bookworm", "moe-lens:test"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
DOCKER, COMPOSE = "/usr/bin/docker", "/usr/bin/docker-compose"


def missing_tools() -> list[str]:
    """What this machine lacks for the tests."""
    return [tool for tool in TOOLS if shutil.which(tool, path="/usr/bin:/usr/sbin") is None]


class Engine:
    """A running dockerd below a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = f"unix://{directory}/docker.sock"
        self.environment = {**os.environ, "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "0"}
        command = ["dockerd", "--host", self.host, "--data-root", str(directory / "data")]
        command += ["--exec-root", str(directory / "exec"), "--pidfile", str(directory / "pid")]
        with (directory / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while subprocess.run(
            [DOCKER, "info"], env=self.environment, capture_output=True
        ).returncode:
            ended = self._process.poll() is not None or time.monotonic() > deadline
            assert not ended, (directory / "dockerd.log").read_text()[-2000:]
            time.sleep(0.2)

    def docker(self, *arguments: str) -> str:
        """Output of a docker command that has to succeed."""
        return self._run([DOCKER, *arguments])

    def compose(self, project: Path, *arguments: str, check: bool = True) -> str:
        """Output of a docker-compose command in a project's directory."""
        return self._run([COMPOSE, *arguments], cwd=project, check=check)

    def stop(self) -> None:
        """End the engine; its data go with the directory."""
        self._process.terminate()
        self._process.wait(60)
        subprocess.run(["umount", "--recursive", "--lazy", self.directory], capture_output=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, command: Sequence[str], cwd: Path | None = None, check: bool = True) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=1200
        )
        assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


def import_base_image(engine: Engine) -> None:
    """A Debian with Python as the image to build on; trusts the authorities that this machine
    trusts, as a mirror may need."""
    root = engine.directory / "base"
    command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:]
    shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    archive = engine.directory / "base.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".")
    engine.docker("import", "--change", f"ENV PIP_CERT={CERTIFICATES}", str(archive), BASE_IMAGE)
    archive.unlink()


def build_image(engine: Engine, project: Path) -> None:
    """The image of the Dockerfile, with torch's wheel handed in."""
    wheels = project / "deploy" / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
    subprocess.run([*pip, "--constraint", str(REPOSITORY / "constraints.txt"), "torch"], check=True)
    arguments = ["--network", "host", "--build-arg", f"BASE_IMAGE={BASE_IMAGE}", "-t", IMAGE]
    engine.docker("build", *arguments, str(project))


def copy_project(destination: Path) -> Path:
    """The tracked files, and nothing that lies about."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target)
    return destination
