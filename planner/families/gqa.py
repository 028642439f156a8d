"""Families with grouped-query attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.errors import InvalidInputError
from planner.families.parts import (
    gated_ffn,
    grouped_query_attention,
    linear,
    qkvo,
    vectors,
)
from planner.families.reader import ConfigReader
from planner.layers import AttentionSpec, LayerSpec, ParameterCount
from planner.spec import ModelSpec

NO_PARAMETERS = ParameterCount()


@dataclass(frozen=True)
class _Shape:
    """What every family of this file has, read once."""

    hidden: int
    n_layers: int
    vocab: int
    context: int
    attention: AttentionSpec
    tied: bool


def _shape(config: ConfigReader, default_head_dim: int | None = None) -> _Shape:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=default_head_dim or hidden // heads)
    kv_heads = config.integer("num_key_value_heads", default=heads)
    return _Shape(
        hidden=hidden,
        n_layers=config.integer("num_hidden_layers"),
        vocab=config.integer("vocab_size"),
        context=config.integer("max_position_embeddings"),
        attention=grouped_query_attention(heads, kv_heads, head_dim),
        tied=config.flag("tie_word_embeddings", False),
    )


def _experts(config: ConfigReader, *count_keys: str) -> tuple[int, int]:
    """Routed experts and how many a token uses."""
    count = config.integer(*count_keys)
    used = config.integer("num_experts_per_tok")
    if used > count:
        problem = f"must be at most the {count} experts, is {used}"
        raise InvalidInputError("num_experts_per_tok", problem)
    return count, used


def _sparse_layer(
    shape: _Shape, attention: ParameterCount, experts: tuple[int, int], expert: ParameterCount
) -> LayerSpec:
    """A layer whose every FFN parameter is in routed experts, with two RMS norms."""
    return LayerSpec(
        attention=attention,
        norm=vectors(shape.hidden, shape.hidden),
        router=linear(shape.hidden, experts[0]),
        expert=expert,
        n_experts=experts[0],
        experts_per_token=experts[1],
        shared_expert=NO_PARAMETERS,
        dense=NO_PARAMETERS,
    )


def _dense_layer(sparse: LayerSpec, dense: ParameterCount) -> LayerSpec:
    """`sparse` with its router and experts replaced by one FFN."""
    return replace(
        sparse,
        router=NO_PARAMETERS,
        expert=NO_PARAMETERS,
        n_experts=0,
        experts_per_token=0,
        shared_expert=NO_PARAMETERS,
        dense=dense,
    )


def _model(
    config: ConfigReader,
    family: str,
    shape: _Shape,
    layer_at: Callable[[int], LayerSpec],
    expert_hidden: int,
    final_norm: ParameterCount | None = None,
    head_bias: bool = False,
) -> ModelSpec:
    layers = tuple(layer_at(index) for index in range(shape.n_layers))
    sparse = next((layer for layer in layers if layer.is_sparse), layers[0])
    head = NO_PARAMETERS if shape.tied else linear(shape.hidden, shape.vocab)
    return ModelSpec(
        name=config.model_name,
        family=family,
        hidden_size=shape.hidden,
        expert_hidden_size=expert_hidden,
        n_experts=sparse.n_experts,
        experts_per_token=sparse.experts_per_token,
        vocab_size=shape.vocab,
        max_context_tokens=shape.context,
        attention=shape.attention,
        layers=layers,
        embedding=linear(shape.vocab, shape.hidden),
        final_norm=final_norm or vectors(shape.hidden),
        head=head + vectors(shape.vocab if head_bias else 0),
        weight_format=config.weight_format(),
    )


def mixtral(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    inner = config.integer("intermediate_size")
    layer = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention),
        _experts(config, "num_local_experts", "num_experts"),
        gated_ffn(shape.hidden, inner),
    )
    layer = replace(layer, window_tokens=config.optional_integer("sliding_window"))
    return _model(config, "mixtral", shape, lambda _: layer, inner)


def qwen2_moe(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    bias = config.flag("qkv_bias", True)
    shared = gated_ffn(shape.hidden, config.integer("shared_expert_intermediate_size"))
    inner = config.integer("moe_intermediate_size")
    sparse = replace(
        _sparse_layer(
            shape,
            qkvo(shape.hidden, shape.attention, qkv_bias=bias),
            _experts(config, "num_experts"),
            gated_ffn(shape.hidden, inner),
        ),
        shared_expert=shared + linear(shape.hidden, 1),  # its sigmoid gate
    )
    at = _qwen_layer(config, shape, sparse, _qwen2_windows(config, shape.n_layers))
    return _model(config, "qwen2_moe", shape, at, inner)


def qwen3_moe(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    bias = config.flag("attention_bias", False)
    head_norms = vectors(shape.attention.key_size, shape.attention.key_size)
    inner = config.integer("moe_intermediate_size")
    sparse = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention, bias, bias) + head_norms,
        _experts(config, "num_experts", "num_local_experts"),
        gated_ffn(shape.hidden, inner),
    )
    sliding = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window") if sliding else None
    at = _qwen_layer(config, shape, sparse, [window] * shape.n_layers)
    return _model(config, "qwen3_moe", shape, at, inner)


def _qwen_layer(
    config: ConfigReader, shape: _Shape, sparse: LayerSpec, windows: list[int | None]
) -> Callable[[int], LayerSpec]:
    """Sparse at every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step = config.integer("decoder_sparse_step", default=1)
    dense_only = set(config.list_of("mlp_only_layers", int) or [])
    if dense_only or step > 1:
        dense = _dense_layer(sparse, gated_ffn(shape.hidden, config.integer("intermediate_size")))
    else:
        dense = sparse

    def at(index: int) -> LayerSpec:
        is_sparse = index not in dense_only and (index + 1) % step == 0
        return replace(sparse if is_sparse else dense, window_tokens=windows[index])

    return at


def _qwen2_windows(config: ConfigReader, n_layers: int) -> list[int | None]:
    if not config.flag("use_sliding_window", False):
        return [None] * n_layers
    window = config.optional_integer("sliding_window")
    types = config.list_of("layer_types", str)
    if types is None:
        first_full = config.integer("max_window_layers", default=28, minimum=0)
        types = [
            "sliding_attention" if index % 2 == 0 and index < first_full else "full_attention"
            for index in range(n_layers)
        ]
    return _windows(types, window, n_layers)


def _windows(types: list[str], window: int | None, n_layers: int) -> list[int | None]:
    if len(types) != n_layers:
        problem = f"must have one entry for each of the {n_layers} layers, has {len(types)}"
        raise InvalidInputError("layer_types", problem)
    return [window if kind == "sliding_attention" else None for kind in types]


def olmoe(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    bias = config.flag("attention_bias", False)
    key_norm = shape.hidden // shape.attention.n_q_heads * shape.attention.n_kv_heads
    inner = config.integer("intermediate_size")
    layer = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention, bias, bias) + vectors(shape.hidden, key_norm),
        _experts(config, "num_experts", "num_local_experts"),
        gated_ffn(shape.hidden, inner),
    )
    return _model(config, "olmoe", shape, lambda _: layer, inner)


def phimoe(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    bias = config.flag("attention_bias", False)
    inner = config.integer("intermediate_size")
    layer = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention, bias, bias),
        _experts(config, "num_local_experts"),
        gated_ffn(shape.hidden, inner),
    )
    layer_norm = vectors(shape.hidden, shape.hidden)  # weight and bias
    window = config.optional_integer("sliding_window")
    layer = replace(layer, norm=layer_norm * 2, window_tokens=window)
    head_bias = config.flag("lm_head_bias", False)
    return _model(config, "phimoe", shape, lambda _: layer, inner, layer_norm, head_bias)


def granitemoe(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    bias = config.flag("attention_bias", False)
    inner = config.integer("intermediate_size")
    layer = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention, bias, bias),
        _experts(config, "num_local_experts"),
        gated_ffn(shape.hidden, inner),
    )
    return _model(config, "granitemoe", shape, lambda _: layer, inner)


def gpt_oss(config: ConfigReader) -> ModelSpec:
    shape = _shape(config, default_head_dim=64)
    bias = config.flag("attention_bias", True)
    sinks = vectors(shape.attention.n_q_heads)
    inner = config.integer("intermediate_size")
    experts = _experts(config, "num_local_experts", "num_experts")
    layer = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention, bias, bias) + sinks,
        experts,
        gated_ffn(shape.hidden, inner, bias=True),
    )
    layer = replace(layer, router=linear(shape.hidden, experts[0], bias=True))
    types = config.list_of("layer_types", str)
    if types is None:  # sliding and full take turns
        both = ("sliding_attention", "full_attention")
        types = [both[index % 2] for index in range(shape.n_layers)]
    windows = _windows(types, config.integer("sliding_window", default=128), shape.n_layers)
    at = [replace(layer, window_tokens=window) for window in windows].__getitem__
    return _model(config, "gpt_oss", shape, at, inner)


def glm4_moe(config: ConfigReader) -> ModelSpec:
    shape = _shape(config)
    bias = config.flag("attention_bias", False)
    attention = qkvo(shape.hidden, shape.attention, qkv_bias=bias)
    if config.flag("use_qk_norm", False):
        attention += vectors(shape.attention.key_size, shape.attention.key_size)
    inner = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", default=1)
    sparse = replace(
        _sparse_layer(
            shape,
            attention,
            _experts(config, "n_routed_experts", "num_local_experts"),
            gated_ffn(shape.hidden, inner),
        ),
        shared_expert=gated_ffn(shape.hidden, inner * shared),
    )
    first_sparse = config.integer("first_k_dense_replace", default=1, minimum=0)
    dense = _dense_layer(sparse, gated_ffn(shape.hidden, config.integer("intermediate_size")))
    return _model(
        config, "glm4_moe", shape, lambda i: sparse if i >= first_sparse else dense, inner
    )


def minimax_m2(config: ConfigReader) -> ModelSpec:
    shape = _shape(config, default_head_dim=128)
    q_width = shape.attention.query_elements
    k_width = shape.attention.kv_elements // 2
    inner = config.integer("intermediate_size")
    layer = _sparse_layer(
        shape,
        qkvo(shape.hidden, shape.attention) + vectors(q_width, k_width),
        _experts(config, "num_local_experts", "num_experts"),
        gated_ffn(shape.hidden, inner),
    )
    return _model(config, "minimax_m2", shape, lambda _: layer, inner)
