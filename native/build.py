"""Builds the C extensions (cffi, API mode). `python native/build.py all` builds them in place.

setup.py names the `*_builder` functions. Each C header says once, between `[cffi]` and
`[/cffi]`, what Python may see of it; nothing is declared a second time here.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
# fp-contract=off: a*b+c is fused only where the code says so, so that the compiler cannot make
# two instantiations of one loop round differently.
FLAGS = [
    "-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", "-Wno-psabi",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden",
]  # fmt: skip

_EXPORTED = re.compile(r"/\* \[cffi\] \*/(.*?)/\* \[/cffi\] \*/", re.DOTALL)


def declarations(header: str) -> str:
    """What the header `native/<header>` exports to Python.

    Raises ValueError where the header has no `[cffi]` section.
    """
    sections = _EXPORTED.findall((ROOT / "native" / header).read_text())
    if not sections:
        raise ValueError(f"native/{header} has no /* [cffi] */ ... /* [/cffi] */ section")
    return "\n".join(sections)


def builder(
    name: str, headers: list[str], sources: list[str], libraries: list[str], root: str
) -> FFI:
    """An FFI for `native.<name>` from files of native/; `root` is the repository's path."""
    native = Path(root) / "native"
    ffi = FFI()
    for header in headers:
        ffi.cdef(declarations(header))
    ffi.set_source(
        f"native.{name}",
        "\n".join(f'#include "{header}"' for header in headers),
        sources=[str(native / source) for source in sources],
        depends=sorted(str(native / path.name) for path in (ROOT / "native").glob("*.h")),
        include_dirs=[str(native)],
        extra_compile_args=FLAGS,
        libraries=libraries,
    )
    return ffi


ATTENTION_SOURCES = [
    "attention_dispatch.c",
    "attention_walk.c",
    "attention_scalar.c",
    "attention_avx2.c",
    "attention_avx512.c",
    "attention_avx512_bf16.c",
    "attention_avx512_vnni.c",
    "kv_layout.c",
    "merge.c",
]


def attention_builder(root: str = "") -> FFI:
    """Attention kernels, KV store and merge (native/attention.h)."""
    return builder(
        "_attention",
        headers=["cpu_features.h", "dtype.h", "attention.h"],
        sources=["cpu_features.c", *ATTENTION_SOURCES],
        libraries=["m"],
        root=root,
    )


CHANNEL_SOURCES = [
    "segment_layout.c",
    "segment.c",
    "plan.c",
    "channel.c",
    "unit.c",
    "worker.c",
]


def channel_builder(root: str = "") -> FFI:
    """Shared-memory segment, the device's port, the attention process's loop (native/channel.h)."""
    return builder(
        "_channel",
        headers=["cpu_features.h", "dtype.h", "attention.h", "abi.h", "channel.h"],
        sources=["cpu_features.c", *ATTENTION_SOURCES, *CHANNEL_SOURCES],
        libraries=["m"],
        root=root,
    )


GEMM_SOURCES = [
    "thread_pool.c",
    "gemm.c",
    "gemm_pack.c",
    "gemm_scalar.c",
    "gemm_avx2.c",
    "gemm_avx512.c",
    "gemm_avx512_bf16.c",
    "layer_ops.c",
    "moe.c",
    "host_memory.c",
]


def gemm_builder(root: str = "") -> FFI:
    """The CPU device's compute: thread pool, matrix products, layer operations."""
    return builder(
        "_gemm",
        headers=[
            "cpu_features.h",
            "dtype.h",
            "thread_pool.h",
            "gemm.h",
            "layer_ops.h",
            "moe.h",
            "host_memory.h",
        ],
        sources=["cpu_features.c", *GEMM_SOURCES],
        libraries=["m"],
        root=root,
    )


BUILDERS = {"attention": attention_builder, "channel": channel_builder, "gemm": gemm_builder}


def build_in_place(name: str) -> Path:
    """Compile one extension; returns the path of the shared library in native/.

    Objects go to build/cffi/<name>, so that extensions that share sources do not share
    object files; the library is renamed into place, so that running processes keep the old one.
    """
    work_dir = ROOT / "build" / "cffi" / name
    work_dir.mkdir(parents=True, exist_ok=True)
    built = Path(BUILDERS[name](str(ROOT)).compile(tmpdir=str(work_dir)))
    arriving = ROOT / "native" / f".{built.name}.new"
    shutil.copy2(built, arriving)
    # The name that an installation gives it (cffi's code keeps to the stable ABI): under another
    # one, an older build of either kind would shadow this one.
    return arriving.replace(ROOT / "native" / f"_{name}.abi3.so")


def main(arguments: list[str]) -> int:
    """Build the extensions named (all of them for `all`)."""
    names = list(BUILDERS) if arguments == ["all"] else arguments
    if not names or not set(names) <= BUILDERS.keys():
        print(f"usage: build.py all | one or more of {', '.join(BUILDERS)}", file=sys.stderr)
        return 2
    for name in names:
        print(build_in_place(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
