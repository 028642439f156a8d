"""A model as the planner sees it: counts, bytes and FLOPs, from a config.json.

Counts are those of the modules that transformers builds from the same configuration (tied
embeddings once, multi-token-prediction layers not at all).
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.errors import InvalidInputError
from planner.formats import KvFormat, WeightFormat, kv_format, weight_format
from planner.layers import AttentionSpec, LayerSpec, ParameterCount


@dataclass(frozen=True)
class ModelSpec:
    """A mixture-of-experts decoder. Layers are in order; equal layers are one shared object.

    `head` is zero where it is tied to the embedding. `expert_hidden_size` is the inner width of a
    routed expert; `n_experts` and `experts_per_token` are those of the sparse layers.
    """

    name: str
    family: str
    hidden_size: int
    expert_hidden_size: int
    n_experts: int
    experts_per_token: int
    vocab_size: int
    max_context_tokens: int
    attention: AttentionSpec
    layers: tuple[LayerSpec, ...]
    embedding: ParameterCount
    final_norm: ParameterCount
    head: ParameterCount
    weight_format: str = "bf16"
    kv_format: str = "bf16"

    def __post_init__(self) -> None:
        weight_format(self.weight_format)
        kv_format(self.kv_format)

    # -- construction ---------------------------------------------------------------------------

    @staticmethod
    def from_config(config: Mapping[str, Any], name: str | None = None) -> "ModelSpec":
        """Build from the contents of a config.json.

        Raises InvalidInputError naming the field that is missing or wrong, or the families nearest
        to an unsupported `model_type`.
        """
        from planner.families import build

        return build(config, name)

    @staticmethod
    def from_directory(path: str | Path) -> "ModelSpec":
        """Build from the config.json of a Hugging Face checkpoint directory."""
        directory = Path(path)
        file = directory / "config.json"
        if not file.is_file():
            raise InvalidInputError("model", f"{file} does not exist")
        try:
            config = json.loads(file.read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InvalidInputError("model", f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise InvalidInputError("model", f"{file} holds no JSON object")
        return ModelSpec.from_config(config, name=directory.resolve().name)

    def with_formats(self, weights: str | None = None, kv: str | None = None) -> "ModelSpec":
        """The same model with its weights or its KV cache stored in other formats."""
        return replace(
            self, weight_format=weights or self.weight_format, kv_format=kv or self.kv_format
        )

    # -- shape ----------------------------------------------------------------------------------

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_q_heads(self) -> int:
        return self.attention.n_q_heads

    @property
    def n_kv_heads(self) -> int:
        return self.attention.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one cached key (for latent attention: latent and rotary part)."""
        return self.attention.key_size

    @property
    def query_heads_per_kv_head(self) -> float:
        """s of the throughput model: query heads that share one cached key."""
        return self.n_q_heads / self.n_kv_heads

    # -- parameters -----------------------------------------------------------------------------

    @cached_property
    def _layer_counts(self) -> Counter[LayerSpec]:
        return Counter(self.layers)

    @cached_property
    def total_parameters(self) -> int:
        layers = sum(layer.total_parameters * n for layer, n in self._layer_counts.items())
        return layers + self._outside_layers

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token touches, embedding and head included (12.9 B of 46.7 B for
        Mixtral-8x7B)."""
        layers = sum(layer.active_parameters * n for layer, n in self._layer_counts.items())
        return layers + self._outside_layers

    @property
    def _outside_layers(self) -> int:
        return self.embedding.total + self.final_norm.total + self.head.total

    @cached_property
    def parameters_by_kind(self) -> dict[str, int]:
        """All parameters by what they are for; sums to `total_parameters`."""
        by_kind: Counter[str] = Counter()
        for layer, n in self._layer_counts.items():
            for kind in ("attention", "norm", "router", "shared_expert", "dense"):
                by_kind[kind] += getattr(layer, kind).total * n
            by_kind["routed_experts"] += layer.expert.total * layer.n_experts * n
        by_kind["embedding"] = self.embedding.total
        by_kind["final_norm"] = self.final_norm.total
        by_kind["head"] = self.head.total
        return dict(by_kind)

    # -- bytes ----------------------------------------------------------------------------------

    @cached_property
    def layer_weights_bytes(self) -> tuple[int, ...]:
        """Stored size of each decoder layer, in order, quantisation scales included."""
        fmt = weight_format(self.weight_format)
        sizes = {layer: _layer_bytes(layer, fmt) for layer in self._layer_counts}
        return tuple(sizes[layer] for layer in self.layers)

    @property
    def largest_layer_bytes(self) -> int:
        return max(self.layer_weights_bytes)

    @cached_property
    def streamed_bytes_per_pass(self) -> int:
        """W: bytes that one pass moves to the device when no layer is resident (all decoder
        layers, every expert; embedding and head stay on the device)."""
        return sum(self.layer_weights_bytes)

    @cached_property
    def resident_bytes(self) -> int:
        """Embedding, final norm and head, which stay on the device."""
        return self._outside_layers * weight_format(self.weight_format).rest_bits_per_parameter // 8

    @property
    def weights_bytes(self) -> int:
        return self.streamed_bytes_per_pass + self.resident_bytes

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        return _kv_bytes(self.attention, kv_format(self.kv_format))

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache that one token takes over all layers (the paged pool keeps the tokens that a
        sliding-window layer no longer reads)."""
        return self.n_layers * self.kv_bytes_per_token_per_layer

    def kv_read_bytes(self, context_tokens: float) -> float:
        """KV that all layers read to decode one token at a context; windows respected."""
        per_layer = self.kv_bytes_per_token_per_layer
        return per_layer * self._visible_tokens(context_tokens)

    def kv_capacity_tokens(self, kv_bytes: float) -> int:
        """M: whole tokens that fit into `kv_bytes`."""
        return math.floor(kv_bytes / self.kv_bytes_per_token)

    # -- work -----------------------------------------------------------------------------------

    @cached_property
    def layers_gemm_flops_per_token(self) -> int:
        """FLOPs of all layers' matrices for one token (multiply and add counted as two)."""
        return sum(2 * layer.active_parameters * n for layer, n in self._layer_counts.items())

    @property
    def head_flops_per_token(self) -> int:
        """FLOPs of the head for one token whose successor is sampled."""
        return 2 * self.vocab_size * self.hidden_size

    def attention_flops_per_token(self, context_tokens: float) -> float:
        """FLOPs of all layers' attention for one token at a context; windows respected."""
        return self.attention.flops(1.0) * self._visible_tokens(context_tokens)

    def flops_per_token(self, context_tokens: float) -> float:
        """All FLOPs of one decoded token that attends to `context_tokens` tokens."""
        gemm = self.layers_gemm_flops_per_token + self.head_flops_per_token
        return gemm + self.attention_flops_per_token(context_tokens)

    @property
    def attention_flops_per_kv_byte(self) -> float:
        """FLOPs of attention per KV byte read (s for grouped-query attention over BF16)."""
        return self.attention.flops(1.0) / self.kv_bytes_per_token_per_layer

    @property
    def attention_input_elements(self) -> int:
        """Activations per token and layer that go to the CPU: query, new K and V."""
        return self.attention.query_elements + self.attention.kv_elements

    @property
    def attention_output_elements(self) -> int:
        """Activations per token and layer that come back from the CPU."""
        return self.attention.output_elements

    def _visible_tokens(self, context_tokens: float) -> float:
        counts = self._layer_counts.items()
        return sum(layer.visible_tokens(context_tokens) * n for layer, n in counts)


def _layer_bytes(layer: LayerSpec, fmt: WeightFormat) -> int:
    rest = Fraction(fmt.rest_bits_per_parameter)
    attention_bits = rest if fmt.experts_only else fmt.bits_per_parameter
    ffn = layer.shared_expert + layer.dense
    routed = layer.expert * layer.n_experts
    vectors = layer.attention.vector + layer.norm.total + ffn.vector + routed.vector
    bits = (
        attention_bits * (layer.attention.matrix + ffn.matrix)
        + fmt.bits_per_parameter * routed.matrix
        + rest * (vectors + layer.router.total)
    )
    return math.ceil(bits / 8)


def _kv_bytes(attention: AttentionSpec, fmt: KvFormat) -> int:
    # A scale for K and one for V per KV head; the latent of MLA has one for both.
    scales = attention.n_kv_heads * (1 if attention.kind == "mla" else 2)
    return attention.kv_elements * fmt.bytes_per_element + scales * fmt.scale_bytes
