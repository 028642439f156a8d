"""Choice of the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from native import isa
from native.attention import lib
from native.errors import InvalidArgumentError

# The kernel's name for what each set needs, as far as it lists it.
CPUINFO_FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
}


def run_with(value: str) -> subprocess.CompletedProcess[str]:
    program = "from native import attention, isa; print(isa.selected(attention.lib))"
    environment = os.environ | {isa.ENVIRONMENT_VARIABLE: value}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


def test_detection_agrees_with_the_kernel() -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(next(x for x in cpuinfo.splitlines() if x.startswith("flags")).split())
    expected = ["scalar"]
    for name, needed in CPUINFO_FLAGS.items():
        if not needed <= flags:
            break
        expected.append(name)
    assert isa.supported(lib) == tuple(expected)
    assert lib.ml_cpu_has_vnni() == ("avx512_vnni" in flags and "avx512" in expected)


def test_the_best_supported_one_is_the_default() -> None:
    assert run_with("").stdout.strip() == isa.supported(lib)[-1]


@pytest.mark.parametrize("name", isa.supported(lib))
def test_the_environment_variable_forces_one(name: str) -> None:
    assert run_with(name).stdout.strip() == name


def test_an_unknown_name_in_the_environment_is_an_error_that_names_the_nearest() -> None:
    result = run_with("avx5l2")
    assert result.returncode != 0
    assert "MOE_LENS_ISA" in result.stderr
    assert "did you mean 'avx512'" in result.stderr


def test_an_unsupported_one_is_refused_and_changes_nothing() -> None:
    before = lib.ml_isa_selected()
    for wrong in (-1, lib.ML_ISA_COUNT, 99):
        assert lib.ml_isa_set(wrong) == -1
    assert lib.ml_isa_selected() == before
    with pytest.raises(InvalidArgumentError, match="this machine runs scalar"):
        isa.select(lib, "neon")
