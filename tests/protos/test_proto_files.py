"""The .proto files as their readers need them: every call says what a caller has to know."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import (
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from protos.generate import ROOT

grpc_tools = pytest.importorskip("grpc_tools.protoc", reason="run: make build")

OURS = "moelens.v1"
# Numbers of FileDescriptorProto.service and ServiceDescriptorProto.method: they make up the path
# under which a comment is found.
SERVICE, METHOD = 6, 2
CODES = [code.name for code in grpc.StatusCode]
LONGEST_LINE = 100


def compiled() -> list[FileDescriptorProto]:
    """All .proto files with their comments."""
    sources = sorted(str(path) for path in ROOT.glob("moelens/v1/*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.NamedTemporaryFile() as out:
        arguments = [f"-I{ROOT}", f"-I{include}", "--include_source_info"]
        command = ["protoc", *arguments, f"--descriptor_set_out={out.name}", *sources]
        assert grpc_tools.main(command) == 0
        return list(FileDescriptorSet.FromString(Path(out.name).read_bytes()).file)


FILES = compiled()


def calls() -> Iterator[tuple[str, str]]:
    """Full name and comment of every RPC."""
    for file in FILES:
        comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}
        for i, service in enumerate(file.service):
            for j, method in enumerate(service.method):
                name = f"{file.package}.{service.name}/{method.name}"
                yield name, comments.get((SERVICE, i, METHOD, j), "")


def enums() -> Iterator[EnumDescriptorProto]:
    for file in FILES:
        yield from file.enum_type
        for message in file.message_type:
            yield from message.enum_type


def test_all_services_are_looked_at() -> None:
    services = {name.partition("/")[0] for name, _ in calls()}
    expected = {f"{OURS}.{name}" for name in ("Gateway", "Planner", "GpuWorker", "CpuWorker")}
    assert services == {*expected, "inference.GRPCInferenceService"}


@pytest.mark.parametrize(("name", "comment"), list(calls()), ids=lambda value: str(value)[:60])
def test_every_call_says_what_it_does_how_it_ends_and_whether_to_retry(
    name: str, comment: str
) -> None:
    words = " ".join(comment.split())
    assert len(words.split(".")[0].split()) >= 3, "what it does"
    assert any(re.search(rf"\b{code}\b", words) for code in CODES), "its status codes"
    assert re.search(r"\bretry\b", words), "whether to retry"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_call_has_messages_of_its_own(file: FileDescriptorProto) -> None:
    for service in file.service:
        for method in service.method:
            assert method.input_type == f".{file.package}.{method.name}Request"
            assert method.output_type == f".{file.package}.{method.name}Response"


@pytest.mark.parametrize("enum", list(enums()), ids=lambda enum: enum.name)
def test_zero_of_an_enum_is_unspecified(enum: EnumDescriptorProto) -> None:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
    assert {value.number: value.name for value in enum.value}[0] == f"{prefix}_UNSPECIFIED"
    assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


@pytest.mark.parametrize("path", sorted(ROOT.glob("moelens/v1/*.proto")), ids=lambda p: p.name)
def test_lines_fit_the_page(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= LONGEST_LINE, f"{path.name}, line {number}"
