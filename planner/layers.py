"""What one decoder layer holds: parameters by kind, and the shape of its attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterCount:
    """Parameters in matrices (which a weight format may quantise) and in vectors (which not)."""

    matrix: int = 0
    vector: int = 0

    @property
    def total(self) -> int:
        return self.matrix + self.vector

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.matrix + other.matrix, self.vector + other.vector)

    def __mul__(self, times: int) -> "ParameterCount":
        return ParameterCount(self.matrix * times, self.vector * times)


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of a layer's attention, as the CPU computes it over cached KV.

    Grouped-query attention caches K and V of every KV head. Multi-head latent attention (`kind`
    "mla") caches one latent per token that all query heads share; queries arrive absorbed into
    the latent space (DeepSeek-V2, section 2.1), so that decode reads the latent alone.
    """

    kind: str
    n_q_heads: int
    n_kv_heads: int
    key_size: int  # elements of one key as scored against a query head
    value_size: int  # elements of one value as summed for a query head
    kv_elements: int  # cached per token: K and V of all KV heads, or the latent

    @property
    def query_elements(self) -> int:
        return self.n_q_heads * self.key_size

    @property
    def output_elements(self) -> int:
        return self.n_q_heads * self.value_size

    def flops(self, context_tokens: float) -> float:
        """Multiply-adds, counted as two, of one query token against `context_tokens` of KV."""
        return 2.0 * self.n_q_heads * (self.key_size + self.value_size) * context_tokens


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. `window_tokens` is None where attention sees the whole context."""

    attention: ParameterCount
    norm: ParameterCount
    router: ParameterCount
    expert: ParameterCount  # one routed expert
    n_experts: int
    experts_per_token: int
    shared_expert: ParameterCount  # all shared experts and their gate
    dense: ParameterCount  # the FFN of a layer without experts
    window_tokens: int | None = None

    @property
    def is_sparse(self) -> bool:
        return self.n_experts > 0

    @property
    def total_parameters(self) -> int:
        return self._always_used + self.expert.total * self.n_experts

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        return self._always_used + self.expert.total * self.experts_per_token

    @property
    def _always_used(self) -> int:
        kinds = (self.attention, self.norm, self.router, self.shared_expert, self.dense)
        return sum(kind.total for kind in kinds)

    def visible_tokens(self, context_tokens: float) -> float:
        """Tokens of a context that this layer's attention reads."""
        if self.window_tokens is None:
            return context_tokens
        return min(context_tokens, float(self.window_tokens))
