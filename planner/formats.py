"""How many bytes a parameter or a KV element takes, scales included."""

from dataclasses import dataclass
from fractions import Fraction

from planner.errors import InvalidInputError, nearest


@dataclass(frozen=True)
class WeightFormat:
    """Storage of weight matrices.

    `bits_per_parameter` holds the scales' share. Vectors (norms, biases), router, embedding and
    head keep `rest_bits_per_parameter`; with `experts_only` so do the attention matrices.
    """

    name: str
    bits_per_parameter: Fraction
    rest_bits_per_parameter: int = 16
    experts_only: bool = False


@dataclass(frozen=True)
class KvFormat:
    """Storage of cached keys and values; `scale_bytes` per token and KV head, for K and for V."""

    name: str
    bytes_per_element: int
    scale_bytes: int = 0


WEIGHT_FORMATS = {
    fmt.name: fmt
    for fmt in (
        WeightFormat("fp32", Fraction(32), rest_bits_per_parameter=32),
        WeightFormat("bf16", Fraction(16)),
        # One FP32 scale per block of 128 x 128 (DeepSeek-V3, Qwen3 FP8 checkpoints).
        WeightFormat("fp8", Fraction(8) + Fraction(32, 128 * 128)),
        # One FP16 scale per group of 128 along the input dimension.
        WeightFormat("int8", Fraction(8) + Fraction(16, 128)),
        # One FP16 scale and one 4-bit zero point per group of 128 (AWQ, GPTQ).
        WeightFormat("int4", Fraction(4) + Fraction(20, 128)),
        # One 8-bit exponent per 32 values (OCP Microscaling), routed experts only (gpt-oss).
        WeightFormat("mxfp4", Fraction(4) + Fraction(8, 32), experts_only=True),
    )
}

KV_FORMATS = {
    fmt.name: fmt
    for fmt in (
        KvFormat("fp32", 4),
        KvFormat("bf16", 2),
        KvFormat("fp8", 1),  # one scale per tensor, not counted
        KvFormat("int8", 1, scale_bytes=4),  # an FP32 scale per token and head
    )
}


def weight_format(name: str) -> WeightFormat:
    """The weight format called `name`; InvalidInputError names the nearest otherwise."""
    if name not in WEIGHT_FORMATS:
        raise InvalidInputError(
            "weight_format", f"unknown format {name!r}; {nearest(name, WEIGHT_FORMATS)}"
        )
    return WEIGHT_FORMATS[name]


def kv_format(name: str) -> KvFormat:
    """The KV format called `name`; InvalidInputError names the nearest otherwise."""
    if name not in KV_FORMATS:
        raise InvalidInputError(
            "kv_format", f"unknown format {name!r}; {nearest(name, KV_FORMATS)}"
        )
    return KV_FORMATS[name]
