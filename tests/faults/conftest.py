"""One stack of services for all tests here but the campaign's, which has its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.overload import FLAGS
from tests.faults.poison import poisoned
from tests.faults.rig import Rig
from tests.servers import DEMO_MODEL


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Ready, with the checkpoint that has a trap (see poison.py) and a short queue."""
    directory = tmp_path_factory.mktemp("faults")
    model = poisoned(DEMO_MODEL, directory / "model")
    with Rig(Path(directory), model=model, flags=FLAGS) as running:
        yield running
