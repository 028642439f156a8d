"""The profile: lines through times, and the command on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.fit import fit
from planner.hardware import HardwareSpec


def test_a_line_is_found_again() -> None:
    counts = [1, 10, 100, 1000]
    line = fit([(1.0, n) for n in counts], [0.5 + 0.02 * n for n in counts])
    assert line.coefficients == pytest.approx((0.5, 0.02))
    assert line.worst_error < 1e-9


def test_features_of_very_different_size_are_told_apart() -> None:
    features = [(1.0, s, b) for s in (1, 8, 64) for b in (1e5, 1e7, 1e9)]
    times_s = [3e-6 + 1e-7 * s + b / 2e10 for _, s, b in features]
    line = fit(features, times_s)
    assert line.coefficients == pytest.approx((3e-6, 1e-7, 1 / 2e10))


def test_no_coefficient_is_negative() -> None:
    line = fit([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [0.9, 2.0, 3.1])
    assert line.coefficients[0] == 0
    assert line.coefficients[1] == pytest.approx(1.0, rel=0.05)
    assert 0.01 < line.mean_error < line.worst_error < 0.2


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="1 points cannot determine 2"):
        fit([(1.0, 2.0)], [3.0])


def run_profile(checkpoint: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    shm = out.parent / "shm"
    shm.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "gpu_worker.profile_cli", "--model", str(checkpoint)]
    command += ["--out", str(out), "--shm-dir", str(shm), "--kv", "2MB"]
    command += ["--max-step-tokens", "128", "--threads", "1", "--attention-processes", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert not list(shm.iterdir())
    return done


MEASURED_WITHOUT_LINK = {
    "attention_bytes_per_s",
    "attention_pair_s",
    "device_time_per_token_s",
    "gpu_sustained_flops_per_s",
    "head_token_s",
    "host_read_bytes_per_s",
    "n_real_tokens",
}


def test_the_profile_of_a_device_without_a_link(checkpoint_fp32: Path, tmp_path: Path) -> None:
    out = tmp_path / "hardware.json"
    done = run_profile(checkpoint_fp32, out)
    assert done.returncode == 0, done.stderr
    hardware = HardwareSpec.load(out)
    for name in MEASURED_WITHOUT_LINK:
        quantity = getattr(hardware, name)
        assert quantity.provenance == "measured"
        assert quantity.value > 0
        assert name in done.stdout
    assert hardware.link_h2d_bytes_per_s is None
    assert hardware.profiled_model == checkpoint_fp32.name


def test_the_profile_of_an_emulated_link(checkpoint_fp32: Path, tmp_path: Path) -> None:
    out = tmp_path / "hardware.json"
    link = ("--emulate-link-gb-per-s", "0.05", "--resident", "0", "--json")
    done = run_profile(checkpoint_fp32, out, *link)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(out.read_text())
    hardware = HardwareSpec.load(out)
    # Never faster than the link, and much slower only on a machine that is very busy.
    assert 0.02e9 < hardware.require("link_h2d_bytes_per_s") < 0.0505e9
    assert 0.02e9 < hardware.require("link_d2h_bytes_per_s") < 0.0505e9
    assert hardware.link_slowdown is not None


def test_a_missing_model_is_one_message(tmp_path: Path) -> None:
    done = run_profile(tmp_path / "nothing", tmp_path / "hardware.json")
    assert done.returncode == 2
    assert "no such directory" in done.stderr
    assert not (tmp_path / "hardware.json").exists()
