"""Typed access to a config.json, with errors that name the key."""

from collections.abc import Mapping
from typing import Any

from planner.errors import InvalidInputError, nearest

_DTYPES = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
_QUANTISED = {"fp8": "fp8", "mxfp4": "mxfp4"}
_BY_BITS = {4: "int4", 8: "int8"}
_BITS_METHODS = ("awq", "gptq", "compressed-tensors", "auto-round")


class ConfigReader:
    """Reads values of a configuration; `prefix` names where nested ones lie."""

    def __init__(self, config: Mapping[str, Any], model_name: str, prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix
        self.model_name = model_name

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """The first of `keys` that is present and not null, or `default`, or an error."""
        key, value = self._find(keys)
        if value is None:
            if default is None:
                raise InvalidInputError(self._prefix + keys[0], "missing from the configuration")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            problem = f"must be an integer of at least {minimum}, is {value!r}"
            raise InvalidInputError(self._prefix + key, problem)
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer that may be absent or null."""
        return None if self._config.get(key) is None else self.integer(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidInputError(self._prefix + key, f"must be true or false, is {value!r}")
        return value

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        """A list of `kind`, or None where absent or null."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            problem = f"must be a list of {kind.__name__}, is {value!r}"
            raise InvalidInputError(self._prefix + key, problem)
        return value

    def section(self, key: str) -> "ConfigReader":
        value = self._config.get(key)
        if not isinstance(value, Mapping):
            raise InvalidInputError(self._prefix + key, "missing from the configuration")
        return ConfigReader(value, self.model_name, f"{self._prefix}{key}.")

    def weight_format(self) -> str:
        """Weight format of the checkpoint: its quantisation if it has one, else its dtype."""
        quantisation = self._config.get("quantization_config")
        if isinstance(quantisation, Mapping):
            return _quantised_format(quantisation)
        dtype = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        if dtype not in _DTYPES:
            problem = f"unknown dtype {dtype!r}; {nearest(str(dtype), _DTYPES)}"
            raise InvalidInputError(self._prefix + "dtype", problem)
        return _DTYPES[dtype]

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self._config.get(key) is not None:
                return key, self._config[key]
        return keys[0], None


def _quantised_format(quantisation: Mapping[str, Any]) -> str:
    method = str(quantisation.get("quant_method"))
    if method in _QUANTISED:
        return _QUANTISED[method]
    if method == "bitsandbytes":
        return "int4" if quantisation.get("load_in_4bit") else "int8"
    bits = quantisation.get("bits", _group_bits(quantisation))
    if method in _BITS_METHODS and bits in _BY_BITS:
        return _BY_BITS[bits]
    known = ", ".join([*_QUANTISED, "bitsandbytes", *_BITS_METHODS])
    problem = f"method {method!r} with {bits} bits is not supported; known: {known} in 4 or 8 bits"
    raise InvalidInputError("quantization_config", problem)


def _group_bits(quantisation: Mapping[str, Any]) -> Any:
    """Bits of a compressed-tensors configuration, which keeps them in its first group."""
    for group in (quantisation.get("config_groups") or {}).values():
        return (group.get("weights") or {}).get("num_bits")
    return None
