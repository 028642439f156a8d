"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native import isa
from native.attention import lib


@pytest.fixture(params=isa.supported(lib))
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for each instruction set of this machine, selected for attention."""
    before = isa.selected(lib)
    isa.select(lib, request.param)
    yield request.param
    isa.select(lib, before)
