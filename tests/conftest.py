"""What every test relies on: the built extensions, and a machine that a test leaves as it was."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

# Shared machines pause: an example's duration says nothing about the code.
settings.register_profile("moe-lens", deadline=None)
settings.load_profile("moe-lens")

EXTENSIONS = ("_attention", "_channel", "_gemm")
REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Say which command is missing instead of failing in a hundred imports."""
    missing = [n for n in EXTENSIONS if importlib.util.find_spec(f"native.{n}") is None]
    if missing:
        raise pytest.UsageError(f"native.{', native.'.join(missing)} not built; run: make build")
    if importlib.util.find_spec("moelens.v1.gateway_pb2") is None:
        raise pytest.UsageError("protocol stubs are missing; run: make protos")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `cuda` run where there is a CUDA device."""
    if not any(item.get_closest_marker("cuda") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    needs_device = [item for item in items if item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=needs_device)
    items[:] = [item for item in items if not item.get_closest_marker("cuda")]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The shipped checkpoint."""
    return REPOSITORY / "demo" / "model"
