"""The channel's C code in C programs: fuzzed, raced, soaked. Numbers of rounds can be raised with
MOE_LENS_FUZZ_MUTATIONS, MOE_LENS_RACE_JOBS and MOE_LENS_SOAK_S (60 for the full soak)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from native import build

PROGRAMS = Path(__file__).parent / "c"
SOURCES = ("cpu_features.c", *build.ATTENTION_SOURCES, *build.CHANNEL_SOURCES)
# Taken out of the environment, where our commands would refuse variables that they do not know.
FUZZ_MUTATIONS = int(os.environ.pop("MOE_LENS_FUZZ_MUTATIONS", "200000"))
RACE_JOBS = int(os.environ.pop("MOE_LENS_RACE_JOBS", "150"))
SOAK_S = float(os.environ.pop("MOE_LENS_SOAK_S", "5"))


def objects(directory: Path, *flags: str) -> list[Path]:
    """The channel and the kernels, compiled with these flags."""
    directory.mkdir()
    kept = [flag for flag in build.FLAGS if flag not in ("-O3", "-Werror")]
    compile_one = ["gcc", *kept, "-g", *flags, "-c", f"-I{build.ROOT / 'native'}"]
    found = [directory / f"{Path(name).stem}.o" for name in SOURCES]
    compilers = [
        subprocess.Popen([*compile_one, build.ROOT / "native" / name, "-o", path])
        for name, path in zip(SOURCES, found, strict=True)
    ]
    assert [compiler.wait() for compiler in compilers] == [0] * len(compilers)
    return found


def linked(program: str, parts: list[Path], *flags: str) -> Path:
    """The program with those objects."""
    binary = parts[0].parent / program
    command = ["gcc", *build.FLAGS, "-g", *flags, f"-I{build.ROOT / 'native'}"]
    source = PROGRAMS / f"{program}.c"
    subprocess.run([*command, source, *parts, "-o", binary, "-lm", "-pthread"], check=True)
    return binary


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Objects without sanitizers."""
    return objects(tmp_path_factory.mktemp("plain") / "o", "-O2")


def run(binary: Path, *arguments: object) -> str:
    done = subprocess.run(
        [binary, *(str(argument) for argument in arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_mutated_words_neither_crash_nor_hang_nor_reach_inputs(tmp_path: Path) -> None:
    sanitizers = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    binary = linked("channel_fuzz", objects(tmp_path / "o", *sanitizers), *sanitizers)
    output = run(binary, FUZZ_MUTATIONS, 1, tmp_path)
    reported = dict(line.rsplit(": ", 1) for line in output.splitlines())
    assert int(reported["mutations"]) >= FUZZ_MUTATIONS
    # All kinds of damage were met and told apart.
    for kind in ("block id", "task's words", "tile's words", "store's words", "job words", "layer"):
        assert any(kind in text for text in reported), kind


def test_loops_and_device_have_no_data_race(tmp_path: Path) -> None:
    flags = ("-O1", "-fsanitize=thread")
    binary = linked("channel_race", objects(tmp_path / "o", *flags), *flags)
    assert f"jobs: {2 * RACE_JOBS}" in run(binary, RACE_JOBS, tmp_path)


def test_parallel_jobs_give_what_lone_jobs_give(plain: list[Path], tmp_path: Path) -> None:
    binary = linked("channel_race", plain)
    assert "jobs: 10000" in run(binary, 5000, tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n_processes", "spin_ns"), [(1, 0), (2, 20000)])
def test_no_job_is_lost_doubled_or_out_of_order(
    plain: list[Path], tmp_path: Path, n_processes: int, spin_ns: int
) -> None:
    binary = linked("channel_soak", plain)
    output = run(binary, SOAK_S, n_processes, spin_ns, tmp_path)
    assert int(output.split()[1].rstrip(",")) > 100 * SOAK_S
