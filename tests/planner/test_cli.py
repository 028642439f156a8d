"""The command: output, JSON, exit statuses, and how quickly it starts."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from planner.cli import app

CASE = ["--model", "mixtral-8x7b", "--hardware", "a40-xeon8380", "--kv", "70GB"]
LENGTHS = ["--prompt", "98", "--generate", "32", "--requests", "25000", "--block", "16"]


def plan(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def answer(*arguments: str):
    done = plan(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_an_estimate_as_json_has_the_published_keys():
    data = answer("estimate", *CASE, *LENGTHS)
    assert data["stage1"]["tokens_per_s"] == pytest.approx(3783, rel=0.03)
    assert data["stage2"]["tokens_per_s"] == pytest.approx(3139, rel=0.03)
    assert data["stage2"]["generated_tokens_per_s"] == pytest.approx(773, rel=0.03)
    assert data["stage1"]["limit"] == "gpu"
    assert data["memory"]["kv_bytes_per_token"] == 131_072
    assert 0 <= data["simulation"]["preemption_share"] <= 1


def test_an_estimate_as_a_table_names_units_and_limits():
    out = plan("estimate", *CASE, *LENGTHS).stdout
    for text in ("Stage 1, upper bound", "70.0 GB (65.2 GiB)", "534,048 tokens", "GPU compute"):
        assert text in out


def test_gb_and_gib_differ_and_both_are_taken():
    gb = answer("estimate", *CASE, *LENGTHS, "--no-simulation")
    gib = answer("estimate", *CASE[:-1], "70GiB", *LENGTHS, "--no-simulation")
    assert gib["memory"]["kv_bytes"] / gb["memory"]["kv_bytes"] == pytest.approx(1.0737, rel=1e-4)


def test_workloads_and_traces_replace_lengths(tmp_path):
    data = answer("estimate", *CASE, "--workload", "mtbench-64", "--no-simulation")
    assert data["workload"]["max_prompt_tokens"] == 450
    assert any("assumed" in note for note in data["notes"])
    trace = tmp_path / "calls.jsonl"
    trace.write_text('{"prompt_tokens": 10, "generated_tokens": 5}\n' * 50)
    data = answer("estimate", *CASE, "--trace", str(trace))
    assert data["workload"]["requests"] == 50
    assert data["workload"]["distribution"] == "trace"


def test_an_estimate_can_be_drawn(tmp_path):
    picture = tmp_path / "estimate.svg"
    assert plan("estimate", *CASE, *LENGTHS, "--plot", str(picture)).exit_code == 0
    assert picture.stat().st_size > 5000


def test_size_compare_explain_and_sweep_answer(tmp_path):
    sized = answer("size", *CASE[:4], *LENGTHS, "--tokens-per-s", "2500", "--no-machines")
    assert sized["schema"] == "moe-lens/size/1"
    assert sized["options"][0]["least"] > 100e9
    compared = answer("compare", *CASE, *LENGTHS)
    assert compared["systems"][0]["system"] == "moe-lens"
    assert compared["systems"][1]["ratio"] > 1
    explained = answer("explain", *CASE, *LENGTHS, "--figure", "stage1.pme")
    assert explained["figures"][0]["formula"] == "2 (p + g) / ((2p + g) g)"
    swept = plan("sweep", *CASE[:4], *LENGTHS, "--over", "kv=50..200GB*2")
    assert swept.stdout.count("\n") == 4
    file = tmp_path / "sweep.csv"
    plan("sweep", *CASE[:4], *LENGTHS, "--over", "kv=50..200GB*2", "--csv", str(file))
    assert file.read_text() == swept.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["size", *CASE[:4], *LENGTHS, "--within", "8h", "--no-machines"],
        ["compare", *CASE, "--workload", "mtbench"],
        ["explain", *CASE, *LENGTHS],
        ["published"],
        ["models"],
        ["models", "dbrx"],
        ["hardware"],
        ["hardware", "rtx4090+epyc9654"],
    ],
)
def test_every_command_has_a_table_for_people(arguments):
    done = plan(*arguments)
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1


def test_lists_as_json():
    assert len(answer("models")["models"]) >= 10
    assert answer("hardware")["schema"] == "moe-lens/hardware-list/1"
    assert answer("hardware", "a40-xeon8380")["schema"] == "moe-lens/hardware/1"
    assert answer("published")["expected_mean_error"] < answer("published")["claimed_mean_error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["estimate", *CASE, "--prompt", "0", "--generate", "32"], "prompt: must be at least 1"),
        (["estimate", *CASE, "--prompt", "98", "--generate", "0"], "generate: must be at least 1"),
        (["estimate", *CASE, "--prompt", "98"], "generate: missing"),
        (["estimate", *CASE[:-1], "1MB", *LENGTHS], "kv: 1.00 MB (977 KiB) holds"),
        (["estimate", *CASE[:-1], "70XB", *LENGTHS], "kv: unknown unit 'XB'"),
        (["estimate", "--model", "mixtral-8x7", *CASE[2:], *LENGTHS], "did you mean mixtral-8x7b"),
        (["estimate", "--model", "./nowhere", *CASE[2:], *LENGTHS], "neither a folder nor"),
        (["estimate", *CASE[:2], "--hardware", "a41", *LENGTHS], "did you mean a40"),
        (["estimate", *CASE, *LENGTHS, "--weights", "int2"], "did you mean int"),
        (["estimate", *CASE, *LENGTHS, "--plot", "x.jpg"], "must end in .png or .svg"),
        (["estimate", *CASE, *LENGTHS, "--requests", "0"], "requests: must be at least 1"),
        (["estimate", *CASE, "--workload", "mtbench", "--trace", "x"], "trace: give either"),
        (["estimate", *CASE, *LENGTHS, "--bogus"], "No such option: --bogus"),
        (["estimate", "--hardware", "t4"], "Missing option '--model'"),
        (["size", *CASE[:4], *LENGTHS], "target: give one of"),
        (["sweep", *CASE, *LENGTHS, "--over", "kvs=1GB"], "did you mean kv"),
        (["explain", *CASE, *LENGTHS, "--figure", "x.y"], "'x.y' is not explained"),
        (["models", "gpt-oss"], "did you mean gpt-oss-20b"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments, said):
    done = plan(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize("module", ["planner", "planner.cli", "planner.estimate"])
def test_starting_loads_nothing_heavy(module):
    heavy = {"torch", "grpc", "numpy", "rich", "matplotlib"}
    code = f"import sys, {module}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_estimate_as_json_loads_nothing_heavy():
    code = (
        "import sys; from planner.cli import app;"
        f"app({['estimate', *CASE, *LENGTHS, '--json']!r}, standalone_mode=False);"
        "print(*{'torch', 'grpc', 'numpy', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
