"""Sweeps: axes, rows, CSV and pictures."""

import csv
import io

import pytest

from planner.errors import InvalidInputError
from planner.estimate import Detail, estimate_with_steps
from planner.inputs import CaseInputs
from planner.pictures import estimate_picture, sweep_picture
from planner.sweep import MAX_ROWS, OUTPUTS, parse_axis, sweep

BASE = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "32", "2000", kv="70GB")


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("prompt=64,128", "prompt", ("64", "128")),
        ("kv=50..400GB*2", "kv", ("50GB", "100GB", "200GB", "400GB")),
        ("kv=50..100GB/3", "kv", ("50GB", "75GB", "100GB")),
        ("link=10..20GB/s/2", "link", ("10GB/s", "20GB/s")),
        ("link=10..40GB/s*2", "link", ("10GB/s", "20GB/s", "40GB/s")),
        ("kv-format=bf16,int8", "kv_format", ("bf16", "int8")),
    ],
)
def test_axes_are_lists_and_ranges(text, name, values):
    axis = parse_axis(text)
    assert (axis.name, axis.values) == (name, values)


@pytest.mark.parametrize(
    "text", ["prompt", "prompt=", "kv=50..400GB", "kv=400..50GB*2", "kv=1..2GB*1", "kv=a..b*2"]
)
def test_what_is_no_axis_is_refused(text):
    with pytest.raises(InvalidInputError, match="over"):
        parse_axis(text)


def test_every_combination_has_a_row_and_the_estimates_figures():
    result = sweep(BASE, [parse_axis("prompt=64,128"), parse_axis("kv=35..140GB*2")])
    assert len(result.rows) == 6
    assert result.columns == ("prompt", "kv", *OUTPUTS, "error")
    rates = result.column("stage2.tokens_per_s")
    assert rates[0] < rates[1] <= rates[2]
    assert result.column("simulation.tokens_per_s") == [None] * 6


def test_the_simulation_is_run_when_asked_for():
    result = sweep(BASE, [parse_axis("kv=35,70GB".replace("35,", "35GB,"))], Detail.SCALED)
    assert all(result.column("simulation.tokens_per_s"))


def test_combinations_that_cannot_run_say_why():
    result = sweep(BASE, [parse_axis("kv=1MB,70GB")])
    assert result.rows[0][-1].startswith("kv: 1.00 MB")
    assert result.rows[1][-1] is None


def test_the_csv_reads_back():
    text = sweep(BASE, [parse_axis("weights=bf16,int4")]).to_csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["weights"] for row in rows] == ["bf16", "int4"]
    assert float(rows[1]["memory.weights_bytes"]) < float(rows[0]["memory.weights_bytes"]) / 3


def test_unknown_inputs_and_too_many_rows_are_refused():
    with pytest.raises(InvalidInputError, match="did you mean prompt"):
        sweep(BASE, [parse_axis("prompts=1")])
    many = parse_axis("prompt=" + ",".join(str(n) for n in range(1, 200)))
    with pytest.raises(InvalidInputError, match=str(MAX_ROWS)):
        sweep(BASE, [many, many])
    with pytest.raises(InvalidInputError, match="at least one axis"):
        sweep(BASE, [])


PNG, SVG = b"\x89PNG", b"<?xml"


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        (["prompt=64,256,1024", "generate=32,128"], None),
        (["kv=10..320GB*2", "generate=32,128"], None),
        (["ram=128GB,256GB", "weights=bf16,int4", "kv_format=bf16,int8"], None),
        (["generate=32,64"], "pareto"),
    ],
)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", PNG), (".svg", SVG)])
def test_sweeps_are_drawn(tmp_path, axes, kind, suffix, magic):
    base = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "32", "2000")
    file = tmp_path / f"picture{suffix}"
    sweep_picture(file, sweep(base, [parse_axis(a) for a in axes]), kind, "title")
    assert file.read_bytes().startswith(magic)
    assert file.stat().st_size > 5000


def test_an_estimate_is_drawn(tmp_path):
    found, steps = estimate_with_steps(BASE.case(), Detail.SCALED)
    estimate_picture(tmp_path / "estimate.png", found, steps)
    assert (tmp_path / "estimate.png").read_bytes().startswith(PNG)


def test_pictures_that_cannot_be_drawn_are_refused(tmp_path):
    result = sweep(BASE, [parse_axis("kv=70GB")])
    with pytest.raises(InvalidInputError, match=r"\.png or \.svg"):
        sweep_picture(tmp_path / "picture.jpg", result, None, "t")
    with pytest.raises(InvalidInputError, match="two axes"):
        sweep_picture(tmp_path / "picture.png", result, "heatmap", "t")
    with pytest.raises(InvalidInputError, match="did you mean pareto"):
        sweep_picture(tmp_path / "picture.png", result, "paretto", "t")
    nothing = sweep(BASE, [parse_axis("kv=1MB")])
    with pytest.raises(InvalidInputError, match="no combination can run"):
        sweep_picture(tmp_path / "picture.png", nothing, None, "t")
    with pytest.raises(InvalidInputError, match="leaves out"):
        found, steps = estimate_with_steps(BASE.case(), Detail.NONE)
        estimate_picture(tmp_path / "picture.png", found, steps)
