"""Mixtral: pre-norm decoder, grouped-query attention, SwiGLU experts, softmax top-k routing.

Names and semantics follow the Hugging Face checkpoint format of `MixtralForCausalLM`.
"""

from collections.abc import Mapping
from typing import Any

from gpu_worker.errors import ConfigurationError
from gpu_worker.families import DecoderConfig, Slot


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json. ConfigurationError names a missing, wrong or unsupported field."""
    _refuse_unsupported(config)
    hidden_size = _positive(config, "hidden_size")
    n_q_heads = _positive(config, "num_attention_heads")
    n_kv_heads = _positive(config, "num_key_value_heads", n_q_heads)
    if n_q_heads % n_kv_heads:
        raise ConfigurationError(
            "num_key_value_heads", f"{n_kv_heads} does not divide num_attention_heads {n_q_heads}"
        )
    n_experts = _positive(config, "num_local_experts")
    experts_per_token = _positive(config, "num_experts_per_tok")
    if experts_per_token > n_experts:
        raise ConfigurationError(
            "num_experts_per_tok", f"{experts_per_token} exceeds num_local_experts {n_experts}"
        )
    return DecoderConfig(
        family="mixtral",
        n_layers=_positive(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=_head_dim(config, hidden_size, n_q_heads),
        n_experts=n_experts,
        experts_per_token=experts_per_token,
        expert_hidden_size=_positive(config, "intermediate_size"),
        vocab_size=_positive(config, "vocab_size"),
        max_context_tokens=_max_context_tokens(config),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-5)),
        rope_theta=_rope_theta(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
    )


def global_slots(config: DecoderConfig) -> list[Slot]:
    """Embedding table, final norm and head (the embedding again where the two are tied)."""
    table = (config.vocab_size, config.hidden_size)
    embedding = "model.embed_tokens.weight"
    head = embedding if config.tied_embeddings else "lm_head.weight"
    return [
        Slot("embedding", table, ((embedding,),), (table,)),
        _vector("final_norm", config.hidden_size, "model.norm.weight"),
        _linear("head", *table, head),
    ]


def attention_in_slots(config: DecoderConfig, layer: int) -> list[Slot]:
    """GA of one layer: input norm and the fused Q, K, V projection (rows q | k | v)."""
    prefix = f"model.layers.{layer}"
    names = tuple(f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv")
    rows = (config.q_size, config.kv_size, config.kv_size)
    shapes = tuple((n, config.hidden_size) for n in rows)
    return [
        _vector("input_norm", config.hidden_size, f"{prefix}.input_layernorm.weight"),
        Slot("qkv", (1, sum(rows), config.hidden_size), (names,), shapes),
    ]


def attention_out_slots(config: DecoderConfig, layer: int) -> list[Slot]:
    """GB of one layer: O projection, post-attention norm, router, experts (rows gate | up)."""
    prefix = f"model.layers.{layer}"
    moe = f"{prefix}.block_sparse_moe"
    hidden, inner, n_experts = config.hidden_size, config.expert_hidden_size, config.n_experts
    gate_up = tuple(
        (f"{moe}.experts.{e}.w1.weight", f"{moe}.experts.{e}.w3.weight") for e in range(n_experts)
    )
    down = tuple((f"{moe}.experts.{e}.w2.weight",) for e in range(n_experts))
    return [
        _linear("o", hidden, config.q_size, f"{prefix}.self_attn.o_proj.weight"),
        _vector("post_norm", hidden, f"{prefix}.post_attention_layernorm.weight"),
        _linear("router", n_experts, hidden, f"{moe}.gate.weight"),
        Slot("gate_up", (n_experts, 2 * inner, hidden), gate_up, ((inner, hidden),) * 2, True),
        Slot("down", (n_experts, hidden, inner), down, ((hidden, inner),)),
    ]


def _vector(name: str, size: int, tensor: str) -> Slot:
    return Slot(name, (size,), ((tensor,),), ((size,),))


def _linear(name: str, rows: int, columns: int, tensor: str) -> Slot:
    return Slot(name, (1, rows, columns), ((tensor,),), ((rows, columns),))


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ConfigurationError(field, "is missing from config.json")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(field, f"must be a positive integer, is {value!r}")
    return value


def _head_dim(config: Mapping[str, Any], hidden_size: int, n_q_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % n_q_heads:
        raise ConfigurationError(
            "num_attention_heads", f"{n_q_heads} does not divide hidden_size {hidden_size}"
        )
    head_dim = _positive(config, "head_dim", hidden_size // n_q_heads)
    if head_dim % 16 or head_dim > 256:
        raise ConfigurationError("head_dim", f"must be a multiple of 16 up to 256, is {head_dim}")
    return head_dim


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigurationError("hidden_act", f"must be 'silu', is {activation!r}")
    if config.get("quantization_config") is not None:
        raise ConfigurationError(
            "quantization_config", "quantized checkpoints are not supported; use BF16 or FP32"
        )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Rotary base; newer configs keep it inside `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigurationError("rope_parameters", f"rope_type must be 'default', is {kind!r}")
    theta = rope.get("rope_theta", config.get("rope_theta", 1e6))
    if not isinstance(theta, int | float) or not theta > 0:
        raise ConfigurationError("rope_theta", f"must be a positive number, is {theta!r}")
    return float(theta)


def _max_context_tokens(config: Mapping[str, Any]) -> int:
    """Up to the sliding window full attention and windowed attention are the same."""
    longest = _positive(config, "max_position_embeddings")
    window = config.get("sliding_window")
    return longest if window is None else min(longest, _positive(config, "sliding_window"))


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
