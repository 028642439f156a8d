"""The house rules that a machine can check: which way imports run, and how the code reads."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.environment import NAMES

ROOT = Path(__file__).resolve().parent.parent
# Who may import whom. The planner's model and policy import neither the wire nor the kernels;
# its service and command use the wire.
ALLOWED = {
    "protos": {"moelens"},
    "moelens": set(),
    "native": set(),
    "planner": set(),
    "planner.service": {"planner", "protos", "moelens"},
    "planner.cli": {"planner", "protos", "moelens"},
    "cpu_worker": {"native", "protos", "moelens", "planner"},
    "gpu_worker": {"native", "protos", "moelens", "planner"},
    "gateway": {"native", "protos", "moelens", "planner"},
    # The one command: its root loads the other processes' subcommands when they are asked for.
    "gateway.cli": {
        "gateway",
        "cpu_worker",
        "gpu_worker",
        "native",
        "protos",
        "moelens",
        "planner",
    },
}
PACKAGES = {name for name in ALLOWED if "." not in name}
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of ours that is not generated."""
    for top in sorted(PACKAGES):
        base = ROOT / "protos" / "moelens" if top == "moelens" else ROOT / top
        for path in sorted(base.rglob("*.py")):
            relative = path.relative_to(base)
            if path.name.endswith(GENERATED) or (
                top == "protos" and relative.parts[0] == "moelens"
            ):
                continue
            parts = [top, *relative.with_suffix("").parts]
            yield ".".join(parts).removesuffix(".__init__"), path


def imported_packages(path: Path) -> set[str]:
    """Our top-level packages that a file imports, wherever in the file it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names & PACKAGES


def rule(module: str) -> set[str]:
    """What a module may import besides its own package: the most specific rule that names it."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(ALLOWED[name] for name in names if name in ALLOWED)


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: str(value))
def test_imports_run_one_way(module: str, path: Path) -> None:
    forbidden = imported_packages(path) - rule(module) - {module.split(".")[0]}
    assert not forbidden, f"{module} must not import {', '.join(sorted(forbidden))}"


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: str(value))
def test_functions_stay_under_seventy_lines(module: str, path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 70, f"{module}.{node.name} has {length} lines"


def test_planner_imports_neither_torch_nor_grpc_nor_numpy() -> None:
    code = "import sys, planner; print(*{'torch', 'grpc', 'numpy'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == ""


def test_committed_stubs_are_what_the_protos_generate() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "protos.generate", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_variable_that_the_code_names_is_a_known_one() -> None:
    sources = [path for _, path in modules()] + [ROOT / "compose.yaml"]
    named = {
        name
        for path in sources
        for name in re.findall(r"MOE_LENS_([A-Z_]*[A-Z])", path.read_text())
    }
    assert named - NAMES == set()
