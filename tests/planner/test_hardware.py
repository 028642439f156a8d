"""HardwareSpec: its file, its checks, several GPUs."""

import json
from dataclasses import replace

import pytest

from planner import catalogue
from planner.errors import InvalidInputError
from planner.hardware import QUANTITY_FIELDS, Curve, HardwareSpec, Quantity

A40 = catalogue.hardware("a40-xeon8380")


def test_a_file_keeps_every_value_and_its_provenance(tmp_path):
    file = tmp_path / "machine.json"
    A40.save(file)
    assert HardwareSpec.load(file) == A40
    data = json.loads(file.read_text())
    assert data["schema"] == "moe-lens/hardware/1"
    assert data["link_h2d_bytes_per_s"]["provenance"] == "measured"
    assert data["device_time_fixed_s"] is None


def test_a_file_keeps_a_curve(tmp_path):
    file = tmp_path / "machine.json"
    curve = Curve(((8.0, 1e-3), (64.0, 2e-3)), "measured", "here")
    spec = replace(A40, device_time_curve=curve)
    spec.save(file)
    assert HardwareSpec.load(file) == spec


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "moe-lens/hardware/9"}, "schema: must be 'moe-lens/hardware/1'"),
        ({"link_h2d_byte_per_s": None}, "link_h2d_byte_per_s: unknown key; did you mean"),
        ({"name": None}, "name: must be a text"),
        ({"gpu_count": 0}, "gpu_count: must be at least 1"),
        ({"gpu_count": 1.5}, "gpu_count: must be of type int"),
        ({"device": "tpu"}, "device: must be 'cuda' or 'cpu'"),
        ({"link_slowdown": 0.5}, "link_slowdown: must be null or an object"),
        ({"link_slowdown": {"value": "x", "provenance": "measured"}}, "value: must be a number"),
        ({"link_slowdown": {"value": -1, "provenance": "measured"}}, "finite number >= 0"),
        ({"link_slowdown": {"value": 1, "provenance": "guess"}}, "provenance: unknown"),
        ({"link_slowdown": {"value": 1, "provenance": "measured", "x": 1}}, "x: unknown key"),
        ({"device_time_curve": [1]}, "device_time_curve: must be null or an object"),
        ({"device_time_curve": {"provenance": "measured"}}, "points: must be pairs"),
        ({"device_time_curve": {"points": [[1, 2]], "provenance": "measured"}}, "at least two"),
        (
            {"device_time_curve": {"points": [[2, 1], [1, 2]], "provenance": "measured"}},
            "ascending counts",
        ),
        (
            {"device_time_curve": {"points": [[1, 1], [2, -2]], "provenance": "measured"}},
            "finite number >= 0",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path, change, said):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**A40.to_json(), **change}))
    with pytest.raises(InvalidInputError, match=said):
        HardwareSpec.load(file)


@pytest.mark.parametrize(("content", "said"), [("{", "not JSON"), ("[]", "no JSON object")])
def test_what_is_no_hardware_file_is_refused(tmp_path, content, said):
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(InvalidInputError, match=said):
        HardwareSpec.load(file)
    with pytest.raises(InvalidInputError, match="cannot read"):
        HardwareSpec.load(tmp_path / "none.json")


def test_unknown_is_none_and_required_values_are_named():
    spec = HardwareSpec("bare")
    assert all(spec.value(field) is None for field in QUANTITY_FIELDS)
    with pytest.raises(InvalidInputError, match=r"hardware\.gpu_flops_per_s: not given for bare"):
        spec.require("gpu_flops_per_s")


def test_values_can_be_set_and_made_unknown():
    spec = A40.with_values("measured", "a test", link_h2d_bytes_per_s=1e9, cpu_cores=None)
    assert spec.link_h2d_bytes_per_s == Quantity(1e9, "measured", "a test")
    assert spec.cpu_cores is None
    with pytest.raises(InvalidInputError, match="did you mean cpu_cores"):
        A40.with_values("measured", "", cpu_core=1.0)


def test_gpus_add_up_and_the_host_does_not():
    four = catalogue.hardware("4xt4-gcp-n1")
    whole = four.combined()
    for field in ("gpu_memory_bytes", "link_h2d_bytes_per_s", "gpu_flops_per_s"):
        assert whole.require(field) == 4 * four.require(field)
    assert whole.host_memory_bytes == four.host_memory_bytes
    assert whole.combined() == whole


def test_a_machine_without_a_gpu_shares_its_cores():
    assert HardwareSpec("laptop").shares_cores
    assert HardwareSpec("laptop", device="cpu", gpu_flops_per_s=Quantity(1, "assumed")).shares_cores
    assert not A40.shares_cores
