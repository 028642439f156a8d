"""Options of the command that say what case is meant, shared by its subcommands."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from planner.inputs import CaseInputs

_HELP = {
    "model": "Name from the catalogue, or a checkpoint's folder.",
    "hardware": "Name (machine, GPU or GPU+HOST), or a hardware file.",
    "prompt": "Prompt tokens of a request.",
    "generate": "Generated tokens of a request.",
    "requests": "Requests in the batch (20000).",
    "workload": "Lengths by name: mtbench, mtbench-64, rag, aime2024, …",
    "trace": "Lengths from JSONL of prompt_tokens and generated_tokens.",
    "kv": "Size of the KV pool (what host memory has left).",
    "block": "Tokens in a KV block (16).",
    "resident": "Layers kept on the GPU: a size, or auto (0).",
    "weights": "Weight format: bf16, fp8, int8, int4, mxfp4 (the checkpoint's).",
    "kv_format": "KV format: bf16, fp8, int8 (bf16).",
    "gpus": "Number of GPUs, each on a link of its own.",
    "ram": "Host memory.",
    "vram": "Memory of one GPU.",
    "link": "Host-to-device rate of one GPU, such as 25GB/s.",
}


def with_case_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn `command(inputs: CaseInputs, …)` into a function with an option for each input."""
    own = list(inspect.signature(command).parameters.values())[1:]
    own_types = get_type_hints(command, include_extras=True)
    case_fields = [field for field in fields(CaseInputs) if field.name in _HELP]

    @wraps(command)
    def flat(**values: Any) -> None:
        inputs = CaseInputs(**{field.name: values.pop(field.name) for field in case_fields})
        command(inputs, **values)

    of_case = [_parameter(field.name) for field in case_fields]
    of_command = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_types[parameter.name])
        for parameter in own
    ]
    parameters = [*of_case, *of_command]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    del flat.__dict__["__wrapped__"]  # or the original's signature would be read
    return flat


def _parameter(name: str) -> inspect.Parameter:
    needed = name in ("model", "hardware")
    kind: Any = str if needed else str | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if needed else None,
        annotation=Annotated[kind, typer.Option(help=_HELP[name], show_default=False)],
    )
