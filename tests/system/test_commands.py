"""`moe-lens` as a user runs it: what it prints, how it refuses, what it leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import descendants, up
from tests.system.models import save_tiny

COMMAND = [sys.executable, "-m", "gateway.cli"]
KEYS = ["text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens"]
SMALL = ["--kv", "8MiB"]


def moe_lens(*arguments: str, stdin: str = "", timeout_s: float = 120.0, **environment: str):  # type: ignore[no-untyped-def]
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "multi-head", "bf16")


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """What a test starts has ended with it; a stack of the session's may live on."""
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """Shared memory of our own, which has to be empty in the end."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    left = list(directory.iterdir())
    shutil.rmtree(directory)
    assert left == []


def test_generate_answers_lines_of_standard_input_in_order(tiny: Path, shm_dir: Path) -> None:
    prompts = ["a tiny model", "few words", "", "none of them well"]
    done = moe_lens(
        *("generate", "--model", str(tiny), "--max-tokens", "5", "--json", "--ignore-eos"),
        *("--shm-dir", str(shm_dir), *SMALL, "-"),
        stdin="\n".join(prompts),
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 4
    assert records[2] == {
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "text: is empty; expected at least one character",
            "field": "text",
        }
    }
    assert done.returncode == 1
    for record in (records[0], records[1], records[3]):
        assert list(record) == KEYS
        assert len(record["token_ids"]) == record["generated_tokens"] == 5
        assert record["finish_reason"] == "length"
    single = moe_lens(
        *("generate", "--model", str(tiny), "--max-tokens", "5", "--json", "--ignore-eos"),
        *("--shm-dir", str(shm_dir), *SMALL, prompts[3]),
    )
    assert single.returncode == 0
    assert json.loads(single.stdout) == records[3]


def test_up_serves_until_a_signal_and_leaves_nothing(
    tiny: Path, shm_dir: Path, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/gateway.sock"
    with up(
        tmp_path, "--model", str(tiny), "--shm-dir", str(shm_dir), *SMALL, address=address
    ) as server:
        assert len(list(descendants(server.process.pid))) >= 5
        assert moe_lens("health", address).returncode == 0
        plain = moe_lens("generate", "--server", address, "--max-tokens", "4", "few words")
        assert plain.returncode == 0, plain.stderr
        assert plain.stdout.endswith("\n")
        second = moe_lens("up", "--model", str(tiny), "--listen", address, *SMALL)
        assert second.returncode == 2
        assert "another process does" in second.stderr
        started = list(descendants(server.process.pid))
        assert server.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert not (tmp_path / "gateway.sock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_can_be_stopped_while_it_starts(
    tiny: Path, shm_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    listen = ("--listen", f"unix:{tmp_path}/g.sock")
    process = subprocess.Popen(
        [*COMMAND, "up", "--model", str(tiny), *listen, "--shm-dir", str(shm_dir), *SMALL],
        stderr=subprocess.DEVNULL,
    )
    while len(list(descendants(process.pid))) < 4:
        time.sleep(0.01)
    process.send_signal(number)
    process.wait(30)


def test_killed_launcher_takes_its_services_along(
    tiny: Path, shm_dir: Path, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/gateway.sock"
    with up(
        tmp_path, "--model", str(tiny), "--shm-dir", str(shm_dir), *SMALL, address=address
    ) as server:
        started = list(descendants(server.process.pid))
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 30
        while any(_alive(pid) for pid in started):
            assert time.monotonic() < end, "a service outlived its launcher"
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def broken(tiny: Path, directory: Path, what: str) -> Path:
    """A copy of the checkpoint with something wrong."""
    copy = directory / "model"
    shutil.copytree(tiny, copy)
    weights = copy / "model.safetensors"
    if what == "no weights":
        weights.unlink()
    elif what == "torn weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif what == "no header":
        weights.write_bytes(b"\xff" * 100)
    elif what == "no tokenizer":
        (copy / "tokenizer.json").unlink()
    elif what == "no config":
        (copy / "config.json").unlink()
    elif what == "another family":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "model_type": "mixtrall"}))
    elif what == "another shape":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    return copy


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no weights", "safetensors"),
        ("torn weights", "model.safetensors"),
        ("no header", "model.safetensors"),
        ("no tokenizer", "tokenizer.json"),
        ("no config", "config.json"),
        ("another family", "mixtral"),
        ("another shape", "embed_tokens"),
    ],
)
def test_unusable_checkpoint_is_refused_by_name(
    tiny: Path, shm_dir: Path, tmp_path: Path, what: str, said: str
) -> None:
    model = broken(tiny, tmp_path, what)
    done = moe_lens(
        *("up", "--model", str(model), "--listen", f"unix:{tmp_path}/g.sock"),
        *("--shm-dir", str(shm_dir), *SMALL),
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv", "100TB"], ["KV cache", "needed", "available"]),
        (["--kv", "12 parsecs"], ["parsecs"]),
        (["--dtype", "fp64"], ["fp64", "bf16"]),
        (["--isa", "avx1024"], ["avx1024", "scalar"]),
        (["--attention-processes", "0"], ["attention_processes", "0"]),
        (["--hardware", "/nowhere.json"], ["/nowhere.json"]),
        (["--shm-dir", "/nowhere"], ["/nowhere"]),
        (["--listen", "nonsense"], ["nonsense", "host:port"]),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    tiny: Path, tmp_path: Path, flags: list[str], said: list[str]
) -> None:
    listen = [] if "--listen" in flags else ["--listen", f"unix:{tmp_path}/g.sock"]
    done = moe_lens("up", "--model", str(tiny), *listen, *flags)
    assert done.returncode == 2
    for word in said:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_options_and_variables_name_the_nearest() -> None:
    option = moe_lens("up", "--modle", "x")
    assert option.returncode == 2
    assert "--modle" in option.stderr
    assert "--model" in option.stderr
    variable = moe_lens("doctor", MOE_LENS_MODLE="x")
    assert variable.returncode == 2
    assert "MOE_LENS_MODLE; did you mean MOE_LENS_MODEL?" in variable.stderr
    command = moe_lens("genrate")
    assert command.returncode == 2
    assert "generate" in command.stderr


def test_generate_without_a_server_says_how_to_start_one(tmp_path: Path) -> None:
    done = moe_lens("generate", "--server", f"unix:{tmp_path}/none.sock", "x")
    assert done.returncode == 1
    assert "moe-lens up" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_looks_at_everything() -> None:
    done = moe_lens("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert {"instruction sets", "cores", "NUMA", "RAM", "/dev/shm", "memlock"} <= set(findings)
    assert {"huge pages", "GPU"} <= set(findings)
    for finding in findings.values():
        assert finding["found"]
        assert finding["meaning"]
        assert finding["status"] == "fine" or finding["advice"]


def test_help_comes_at_once_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom gateway.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("set()")
    for name in ("up", "generate", "doctor", "demo", "plan", "gateway", "cpu-worker"):
        assert name in done.stdout
