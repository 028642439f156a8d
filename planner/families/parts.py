"""Parameter counts of the parts that families share."""

from planner.errors import InvalidInputError
from planner.layers import AttentionSpec, ParameterCount


def linear(inputs: int, outputs: int, bias: bool = False) -> ParameterCount:
    """A matrix of inputs x outputs and, with `bias`, a vector of `outputs`."""
    return ParameterCount(inputs * outputs, outputs if bias else 0)


def vectors(*sizes: int) -> ParameterCount:
    return ParameterCount(0, sum(sizes))


def gated_ffn(hidden: int, inner: int, bias: bool = False) -> ParameterCount:
    """Gate, up and down projections (SwiGLU)."""
    return linear(hidden, inner, bias) * 2 + linear(inner, hidden, bias)


def grouped_query_attention(n_q_heads: int, n_kv_heads: int, head_dim: int) -> AttentionSpec:
    """Attention that caches K and V of `n_kv_heads` heads."""
    if n_q_heads % n_kv_heads:
        problem = f"must divide the {n_q_heads} query heads, is {n_kv_heads}"
        raise InvalidInputError("num_key_value_heads", problem)
    return AttentionSpec(
        kind="gqa",
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        key_size=head_dim,
        value_size=head_dim,
        kv_elements=2 * n_kv_heads * head_dim,
    )


def qkvo(
    hidden: int, attention: AttentionSpec, qkv_bias: bool = False, output_bias: bool = False
) -> ParameterCount:
    """Query, key, value and output projections of grouped-query attention."""
    q_width = attention.n_q_heads * attention.key_size
    kv_width = attention.n_kv_heads * attention.key_size
    projections = linear(hidden, q_width, qkv_bias) + linear(hidden, kv_width, qkv_bias) * 2
    return projections + linear(q_width, hidden, output_bias)
