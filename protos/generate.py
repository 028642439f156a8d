"""Generate the stubs of every .proto file, or check that the committed ones are up to date.

Usage: python -m protos.generate [--check]
"""

import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("moelens/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> list[Path]:
    """Write the stubs below `out`; return their paths relative to it."""
    from grpc_tools import protoc

    sources = sorted((ROOT / PACKAGE).glob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    arguments = [f"-I{ROOT}", f"-I{include}", f"--python_out={out}", f"--pyi_out={out}"]
    arguments += [f"--grpc_python_out={out}", *(str(source) for source in sources)]
    if protoc.main(["protoc", *arguments]) != 0:
        raise SystemExit("protoc failed")
    return [PACKAGE / (source.stem + suffix) for source in sources for suffix in SUFFIXES]


def stale(generated: Path, names: list[Path]) -> list[Path]:
    """The committed stubs that differ from the generated ones, or have no .proto file."""
    differing = [
        name
        for name in names
        if not (ROOT / name).exists()
        or not filecmp.cmp(generated / name, ROOT / name, shallow=False)
    ]
    orphans = [
        path.relative_to(ROOT)
        for path in (ROOT / PACKAGE).iterdir()
        if path.name.endswith(SUFFIXES) and path.relative_to(ROOT) not in names
    ]
    return differing + orphans


def main() -> int:
    """Exit status 1 when --check finds a stale stub."""
    with tempfile.TemporaryDirectory() as directory:
        generated = Path(directory)
        names = generate(generated)
        if "--check" in sys.argv[1:]:
            different = stale(generated, names)
            for name in different:
                print(f"stale: protos/{name} (run: make protos)")
            return 1 if different else 0
        for name in names:
            shutil.copyfile(generated / name, ROOT / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
