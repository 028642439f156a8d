"""Families with multi-head latent attention (DeepSeek-V2 and V3)."""

from dataclasses import dataclass

from planner.errors import InvalidInputError
from planner.families.parts import gated_ffn, linear, vectors
from planner.families.reader import ConfigReader
from planner.layers import AttentionSpec, LayerSpec, ParameterCount
from planner.spec import ModelSpec


@dataclass(frozen=True)
class _Latent:
    """Sizes of latent attention, under the names that the papers use."""

    heads: int
    kv_rank: int
    q_rank: int | None
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class _Defaults:
    """What a configuration that leaves these out means."""

    n_shared: int
    first_sparse: int


def deepseek_v2(config: ConfigReader) -> ModelSpec:
    bias = config.flag("mlp_bias", False)
    return _deepseek(config, "deepseek_v2", _Defaults(n_shared=2, first_sparse=0), bias)


def deepseek_v3(config: ConfigReader) -> ModelSpec:
    return _deepseek(config, "deepseek_v3", _Defaults(n_shared=1, first_sparse=3), False)


def _deepseek(config: ConfigReader, family: str, defaults: _Defaults, ffn_bias: bool) -> ModelSpec:
    hidden = config.integer("hidden_size")
    vocab = config.integer("vocab_size")
    latent = _latent(config)
    attention = _projections(config, hidden, latent)
    layers = _layers(config, hidden, attention, defaults, ffn_bias)
    sparse = layers[-1]
    return ModelSpec(
        name=config.model_name,
        family=family,
        hidden_size=hidden,
        expert_hidden_size=config.integer("moe_intermediate_size"),
        n_experts=sparse.n_experts,
        experts_per_token=sparse.experts_per_token,
        vocab_size=vocab,
        max_context_tokens=config.integer("max_position_embeddings"),
        attention=_attention(latent),
        layers=layers,
        embedding=linear(vocab, hidden),
        final_norm=vectors(hidden),
        head=ParameterCount()
        if config.flag("tie_word_embeddings", False)
        else linear(hidden, vocab),
        weight_format=config.weight_format(),
    )


def _latent(config: ConfigReader) -> _Latent:
    return _Latent(
        heads=config.integer("num_attention_heads"),
        kv_rank=config.integer("kv_lora_rank"),
        q_rank=config.optional_integer("q_lora_rank"),
        nope=config.integer("qk_nope_head_dim"),
        rope=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


def _attention(latent: _Latent) -> AttentionSpec:
    """Absorbed form: all heads read one latent and one rotary key per token."""
    return AttentionSpec(
        kind="mla",
        n_q_heads=latent.heads,
        n_kv_heads=1,
        key_size=latent.kv_rank + latent.rope,
        value_size=latent.kv_rank,
        kv_elements=latent.kv_rank + latent.rope,
    )


def _projections(config: ConfigReader, hidden: int, latent: _Latent) -> ParameterCount:
    bias = config.flag("attention_bias", False)
    query_width = latent.heads * (latent.nope + latent.rope)
    if latent.q_rank is None:
        query = linear(hidden, query_width)
    else:
        down = linear(hidden, latent.q_rank, bias) + vectors(latent.q_rank)
        query = down + linear(latent.q_rank, query_width)
    kv_down = linear(hidden, latent.kv_rank + latent.rope, bias) + vectors(latent.kv_rank)
    kv_up = linear(latent.kv_rank, latent.heads * (latent.nope + latent.value))
    return query + kv_down + kv_up + linear(latent.heads * latent.value, hidden, bias)


def _layers(
    config: ConfigReader,
    hidden: int,
    attention: ParameterCount,
    defaults: _Defaults,
    ffn_bias: bool,
) -> tuple[LayerSpec, ...]:
    """The first `first_k_dense_replace` layers are dense, then every `moe_layer_freq`-th is
    sparse."""
    inner = config.integer("moe_intermediate_size")
    experts = config.integer("n_routed_experts", "num_local_experts", "num_experts")
    used = config.integer("num_experts_per_tok")
    if used > experts:
        problem = f"must be at most the {experts} experts, is {used}"
        raise InvalidInputError("num_experts_per_tok", problem)
    shared = config.integer("n_shared_experts", default=defaults.n_shared)
    dense_ffn = gated_ffn(hidden, config.integer("intermediate_size"), ffn_bias)
    norm, none = vectors(hidden, hidden), ParameterCount()
    dense = LayerSpec(attention, norm, none, none, 0, 0, none, dense_ffn)
    sparse = LayerSpec(
        attention=attention,
        norm=norm,
        router=linear(hidden, experts),
        expert=gated_ffn(hidden, inner),
        n_experts=experts,
        experts_per_token=used,
        shared_expert=gated_ffn(hidden, inner * shared, ffn_bias),
        dense=none,
    )
    first = config.integer("first_k_dense_replace", default=defaults.first_sparse, minimum=0)
    step = config.integer("moe_layer_freq", default=1)
    n_layers = config.integer("num_hidden_layers")
    if first >= n_layers:
        problem = f"must be less than the {n_layers} layers, is {first}"
        raise InvalidInputError("first_k_dense_replace", problem)
    return tuple(sparse if i >= first and i % step == 0 else dense for i in range(n_layers))
