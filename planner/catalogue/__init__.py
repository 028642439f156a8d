"""The models, GPUs, hosts and workloads that the planner knows by name."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from planner.errors import InvalidInputError, NotFoundError, nearest, reject_unknown_keys
from planner.spec import ModelSpec

MODELS_SCHEMA = "moe-lens/models/1"


@cache
def _models() -> Mapping[str, Any]:
    return _read("models.json", MODELS_SCHEMA, "models")


def model_names() -> list[str]:
    """Names that `model` accepts."""
    return sorted(_models())


def read_model_config(name: str) -> dict[str, Any]:
    """The contents of the config.json of a model of the catalogue."""
    return dict(_entry(_models(), name, "model")["config"])


def model(name: str) -> ModelSpec:
    """The catalogue's model called `name`; NotFoundError names the nearest otherwise."""
    return ModelSpec.from_config(read_model_config(name), name)


def _entry(table: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise NotFoundError(what, f"{name!r} is not in the catalogue; {nearest(name, table)}")
    return table[name]


def _read(file: str, schema: str, section: str) -> Mapping[str, Any]:
    data = json.loads((files(__name__) / file).read_text())
    if data.get("schema") != schema:
        raise InvalidInputError(f"{file}.schema", f"must be {schema!r}")
    reject_unknown_keys(data, ("schema", section), file)
    entries: Mapping[str, Any] = data[section]
    return entries
