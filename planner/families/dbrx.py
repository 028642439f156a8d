"""DBRX: its configuration keeps attention and FFN in sections of their own."""

from planner.errors import InvalidInputError
from planner.families.parts import gated_ffn, grouped_query_attention, linear, qkvo, vectors
from planner.families.reader import ConfigReader
from planner.layers import LayerSpec, ParameterCount
from planner.spec import ModelSpec


def dbrx(config: ConfigReader) -> ModelSpec:
    hidden = config.integer("d_model", "hidden_size")
    heads = config.integer("n_heads", "num_attention_heads")
    kv_heads = config.section("attn_config").integer("kv_n_heads")
    attention = grouped_query_attention(heads, kv_heads, hidden // heads)
    ffn = config.section("ffn_config")
    experts, used = ffn.integer("moe_num_experts"), ffn.integer("moe_top_k")
    if used > experts:
        problem = f"must be at most the {experts} experts, is {used}"
        raise InvalidInputError("ffn_config.moe_top_k", problem)
    inner = ffn.integer("ffn_hidden_size")
    vocab = config.integer("vocab_size")
    layer = LayerSpec(
        attention=qkvo(hidden, attention),
        norm=vectors(hidden, hidden),
        router=linear(hidden, experts),
        expert=gated_ffn(hidden, inner),
        n_experts=experts,
        experts_per_token=used,
        shared_expert=ParameterCount(),
        dense=ParameterCount(),
    )
    tied = config.flag("tie_word_embeddings", False)
    return ModelSpec(
        name=config.model_name,
        family="dbrx",
        hidden_size=hidden,
        expert_hidden_size=inner,
        n_experts=experts,
        experts_per_token=used,
        vocab_size=vocab,
        max_context_tokens=config.integer("max_seq_len", "max_position_embeddings"),
        attention=attention,
        layers=(layer,) * config.integer("n_layers", "num_hidden_layers"),
        embedding=linear(vocab, hidden),
        final_norm=vectors(hidden),
        head=ParameterCount() if tied else linear(hidden, vocab),
        weight_format=config.weight_format(),
    )
