"""Model families: from a config.json's `model_type` to a ModelSpec."""

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import InvalidInputError, nearest
from planner.families import dbrx, gqa, mla
from planner.families.reader import ConfigReader
from planner.spec import ModelSpec

Builder = Callable[[ConfigReader], ModelSpec]

FAMILIES: dict[str, Builder] = {
    "mixtral": gqa.mixtral,
    "dbrx": dbrx.dbrx,
    "qwen2_moe": gqa.qwen2_moe,
    "qwen3_moe": gqa.qwen3_moe,
    "olmoe": gqa.olmoe,
    "phimoe": gqa.phimoe,
    "granitemoe": gqa.granitemoe,
    "gpt_oss": gqa.gpt_oss,
    "glm4_moe": gqa.glm4_moe,
    "minimax_m2": gqa.minimax_m2,
    "deepseek_v2": mla.deepseek_v2,
    "deepseek_v3": mla.deepseek_v3,
}


def build(config: Mapping[str, Any], name: str | None = None) -> ModelSpec:
    """The ModelSpec of a config.json's contents; InvalidInputError says what is wrong with it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInputError("model_type", "missing from the configuration")
    if model_type not in FAMILIES:
        raise InvalidInputError(
            "model_type", f"family {model_type!r} is not supported; {nearest(model_type, FAMILIES)}"
        )
    return FAMILIES[model_type](ConfigReader(config, name or model_type))
