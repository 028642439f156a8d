"""`docker compose up` for real: built, answered from the host, a worker killed, nothing left.

About five minutes, nearly all of it debootstrap and the image's build.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import machine
from tests.servers import free_port

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

SERVICES = ("planner", "cpu_worker", "gpu_worker", "gateway")
HEALTHY_TIMEOUT_S = 240.0


class Project:
    """The compose project; ports that nobody uses, limits that this machine allows."""

    def __init__(self, engine: machine.Engine, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        self.gateway = f"127.0.0.1:{free_port()}"
        self.planner = f"127.0.0.1:{free_port()}"
        engine.environment |= {
            "COMPOSE_PROJECT_NAME": "moelenstest",
            "MOE_LENS_IMAGE": machine.IMAGE,
            "MOE_LENS_GATEWAY_PORT": self.gateway,
            "MOE_LENS_PLANNER_PORT": self.planner,
            "MOE_LENS_KV": "64MB",
        }
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        engine.environment["MOE_LENS_MEMLOCK"] = str(hard)

    def container(self, service: str) -> str:
        return self.engine.compose(self.directory, "ps", "-q", service).strip()

    def state(self, service: str) -> dict[str, object]:
        (found,) = json.loads(self.engine.docker("inspect", self.container(service)))
        return dict(found["State"])

    def wait_healthy(self, *services: str) -> None:
        deadline = time.monotonic() + HEALTHY_TIMEOUT_S
        for service in services:
            while self.health(service) != "healthy":
                assert time.monotonic() < deadline, self.engine.compose(self.directory, "logs")
                time.sleep(0.5)

    def health(self, service: str) -> str:
        health = self.state(service).get("Health")
        return str(health["Status"]) if isinstance(health, dict) else "none"


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    missing = machine.missing_tools()
    if missing or os.getuid() != 0:
        pytest.fail(f"needs root and {', '.join(missing) or 'nothing else'}; see .ci/run")
    directory = Path(tempfile.mkdtemp(prefix="moe-lens-docker-"))
    engine = machine.Engine(directory)
    try:
        machine.import_base_image(engine)
        source = machine.copy_project(directory / "project")
        machine.build_image(engine, source)
        project = Project(engine, source)
        engine.compose(source, "up", "-d", "--no-build")
        project.wait_healthy(*SERVICES)
        yield project
        engine.compose(source, "down", "--volumes")
        assert engine.docker("ps", "--all", "--quiet") == ""
        assert engine.docker("volume", "ls", "--quiet") == ""
        assert "moelenstest" not in engine.docker("network", "ls")
    finally:
        engine.stop()


def moe_lens(*arguments: str) -> str:
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOE_LENS_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def generate(address: str) -> dict[str, object]:
    line = moe_lens("generate", "--server", address, "--max-tokens", "16", "--json", "ROMEO:")
    return dict(json.loads(line))


def test_generation_and_planner_answer_from_the_host(project: Project) -> None:
    answer = generate(project.gateway)
    assert answer["generated_tokens"] == 16
    assert moe_lens("health", project.planner).strip() == "SERVING"


def test_services_are_confined(project: Project) -> None:
    for service in SERVICES:
        (found,) = json.loads(project.engine.docker("inspect", project.container(service)))
        assert found["Config"]["User"] == "moelens"
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        published = [port for port in found["NetworkSettings"]["Ports"].values() if port]
        assert bool(published) == (service in ("planner", "gateway"))
        mounts = {mount["Destination"]: mount["RW"] for mount in found["Mounts"]}
        assert mounts.get("/model", False) is False
        assert ("/workers" in mounts) == (service in ("cpu_worker", "gpu_worker"))


@pytest.mark.parametrize("service", ["cpu_worker", "gpu_worker"])
def test_a_killed_worker_comes_back_and_streams_go_on(project: Project, service: str) -> None:
    before = generate(project.gateway)
    started = project.state(service)["StartedAt"]
    pid = project.state(service)["Pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)  # `docker kill` would count as stopped on purpose
    answer = generate(project.gateway)
    assert answer == before
    assert project.state(service)["StartedAt"] != started
    project.wait_healthy(*SERVICES)
