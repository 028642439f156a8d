"""The API as strangers meet it: the .proto files, grpcio, and nothing else of ours."""

import json
import shutil
import subprocess
from pathlib import Path

from tests.servers import REPOSITORY, environment, up

HERE = Path(__file__).parent


def stubs_from_published_files(python: Path, directory: Path) -> Path:
    """Generate stubs from copies of the .proto files, in the client's environment."""
    protos, stubs = directory / "protos" / "moelens" / "v1", directory / "stubs"
    protos.mkdir(parents=True)
    stubs.mkdir()
    for source in (REPOSITORY / "protos" / "moelens" / "v1").glob("*.proto"):
        shutil.copy(source, protos)
    outputs = [f"--python_out={stubs}", f"--grpc_python_out={stubs}"]
    names = [f"moelens/v1/{name}.proto" for name in ("common", "gateway")]
    include = f"-I{protos.parent.parent}"
    subprocess.run([python, "-m", "grpc_tools.protoc", include, *outputs, *names], check=True)
    return stubs


def test_a_client_of_the_protos_alone_completes_every_flow(tmp_path: Path) -> None:
    python = environment("plain-client", "grpcio-tools", "googleapis-common-protos")
    stubs = stubs_from_published_files(python, tmp_path)
    with up(tmp_path, "--kv=64MB", f"--batch-dir={tmp_path / 'batches'}") as server:
        done = subprocess.run(
            [python, HERE / "plain_client.py", server.address, stubs],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    flows = {line["flow"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert flows["unary"] == {"flow": "unary", "model": "model", "text": "ROMEO:", "ready": True}
    assert flows["streaming"]["tokens"] == 24
    assert (flows["streaming"]["first"], flows["streaming"]["last"]) == ("started", "finished")
    assert flows["streaming"]["pieces"] > 1
    assert flows["cancel"]["code"] == "CANCELLED"
    assert flows["abort"] == {"flow": "abort", "code": "CANCELLED", "found": True, "again": False}
    assert flows["deadline"]["code"] == "DEADLINE_EXCEEDED"
    for flow in ("cancel", "deadline", "cancel_batch"):
        assert flows[flow]["free_after_s"] < 2.0
    assert flows["error_detail"] == {
        "flow": "error_detail",
        "code": "INVALID_ARGUMENT",
        "field": "sampling.top_p",
        "reason": "INVALID_ARGUMENT",
    }
    assert flows["batch"]["answered"] == [f"r{i}" for i in range(8)]
    assert (flows["batch"]["failed"], flows["batch"]["state"]) == (1, "BATCH_STATE_COMPLETED")
    assert flows["cancel_batch"]["state"] == "BATCH_STATE_CANCELLED"
