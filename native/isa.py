"""Which instruction set the kernels use: the best one, or the one that MOE_LENS_ISA names.

Each C extension holds its own choice (native/cpu_features.c is linked into each); the binding of
each calls `apply` once when it is imported.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

from native.errors import InvalidArgumentError

ENVIRONMENT_VARIABLE = "MOE_LENS_ISA"
NAMES = ("scalar", "avx2", "avx512", "avx512_bf16")


def supported(lib: Any) -> tuple[str, ...]:
    """Names of the instruction sets that this machine runs, plainest first.

    `lib` is the `lib` of an extension that exports cpu_features.h.
    """
    mask = lib.ml_isa_supported_mask()
    return tuple(name for isa, name in enumerate(NAMES) if mask >> isa & 1)


def selected(lib: Any) -> str:
    """Name of the instruction set that `lib` uses now."""
    return NAMES[lib.ml_isa_selected()]


def select(lib: Any, name: str) -> None:
    """Make `lib` use the instruction set `name` from its next call on.

    Raises InvalidArgumentError where the name is unknown or the machine lacks it.
    """
    runnable = supported(lib)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgumentError(
            f"instruction set {name!r} is unknown{hint} (this machine runs {', '.join(runnable)})"
        )
    if lib.ml_isa_set(NAMES.index(name)) != 0:
        raise InvalidArgumentError(
            f"instruction set {name!r} is not supported by this machine, "
            f"which runs {', '.join(runnable)}"
        )


def apply(lib: Any) -> None:
    """Make `lib` use what MOE_LENS_ISA names; unset or empty leaves the best one.

    Raises InvalidArgumentError, naming the variable, where its value is not one to run.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not name:
        return
    try:
        select(lib, name)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{ENVIRONMENT_VARIABLE}: {error}") from None
