"""Models of the catalogue: what their config.json says, and where it is from."""

from typing import Any

from planner.catalogue.files import check_keys, entry, read_table
from planner.spec import ModelSpec


def model_names() -> list[str]:
    """Names that `model` accepts."""
    return sorted(read_table("models"))


def read_model_config(name: str) -> dict[str, Any]:
    """The contents of the config.json of a model (the keys that counts depend on)."""
    data = entry("models", name, "model")
    check_keys(data, ("source", "config"), (), f"models.json.{name}")
    return dict(data["config"])


def model(name: str) -> ModelSpec:
    """The model called `name`; NotFoundError names the nearest otherwise."""
    return ModelSpec.from_config(read_model_config(name), name)
