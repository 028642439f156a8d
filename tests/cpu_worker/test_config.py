"""The CPU worker's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpu_worker.config import CpuWorkerConfig


def test_defaults_are_valid() -> None:
    assert CpuWorkerConfig().attention_processes is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shm_dir", Path("/nonexistent")),
        ("attention_processes", 0),
        ("attention_processes", 257),
        ("spin_s", -1e-6),
        ("spin_s", float("nan")),
        ("hung_after_s", 0.0),
        ("hung_after_s", float("inf")),
        ("start_timeout_s", float("nan")),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        CpuWorkerConfig(**{field: value})


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="attention_proceses"):
        CpuWorkerConfig(attention_proceses=2)  # type: ignore[call-arg]
