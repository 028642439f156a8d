"""The attention C code under AddressSanitizer and UBSan, and plain with its assertions on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from native import build, isa
from native.attention import lib

PROGRAM = Path(__file__).parent / "c" / "attention_check.c"
SANITIZERS = {
    "address_and_undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"],
    "plain": ["-O3"],
}


@pytest.mark.parametrize("kind", SANITIZERS)
def test_random_shapes_run_clean(kind: str, tmp_path: Path) -> None:
    binary = tmp_path / "attention_check"
    sources = [
        build.ROOT / "native" / name for name in ("cpu_features.c", *build.ATTENTION_SOURCES)
    ]
    # -O1 leaves always_inline bodies with unused temporaries: warnings are the build's matter.
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-Werror")]
    command = ["gcc", *flags, "-g", *SANITIZERS[kind], f"-I{build.ROOT / 'native'}"]
    subprocess.run([*command, PROGRAM, *sources, "-o", binary, "-lm"], check=True)
    result = subprocess.run(
        [binary, "35"], capture_output=True, text=True, env=os.environ | {"LD_PRELOAD": ""}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == list(isa.supported(lib))
