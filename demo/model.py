"""A Mixtral-architecture language model in plain PyTorch, written to be trained on two CPU cores.

The forward pass computes what transformers' `MixtralForCausalLM` computes (tests/demo compares the
two), but experts work on rows sorted by expert: a layer costs three dense GEMMs per expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. Sizes count elements; the names are those of a Mixtral config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 192
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 16:
            raise ValueError(f"head_dim={self.head_dim} must be a multiple of 16")
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must lie between 1 and "
                f"num_local_experts={self.num_local_experts}"
            )


@dataclass(frozen=True)
class Routing:
    """What the routers of one forward pass did, one entry a layer."""

    balance_loss: Tensor  # scalar, mean over layers; 1 where the load is even
    expert_rows: Tensor  # (layers, experts), token-expert pairs that each expert computed


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotary angles, each (max positions, head_dim)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angle = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float64),
        config.rope_theta**-exponent,
    )
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (batch, heads, tokens, head_dim), halves paired as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x is (batch, tokens, hidden_size)."""
        batch, tokens, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, -1, self.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        out = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return projected


class Experts(nn.Module):
    """Router and SwiGLU experts of a layer. Softmax over all experts, top k, renormalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.per_token = config.num_experts_per_tok
        self.count = config.num_local_experts
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(hidden, self.count, bias=False)
        # w1 above w3: one GEMM computes both halves of SwiGLU
        self.w13 = nn.Parameter(torch.empty(self.count, 2 * inner, hidden))
        self.w2 = nn.Parameter(torch.empty(self.count, hidden, inner))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x is (rows, hidden_size). Returns the output, the layer's balance loss and its
        (experts,) count of rows."""
        probability = F.softmax(self.gate(x).float(), dim=-1)
        weight, chosen = probability.topk(self.per_token, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        rows = torch.bincount(chosen.flatten(), minlength=self.count)
        # Switch Transformer's load balancing, with k choices a token: E · Σ_e share_e · mean p_e
        balance = self.count * torch.sum(rows / chosen.numel() * probability.mean(dim=0))
        order = chosen.flatten().argsort(stable=True)
        token = order // self.per_token
        parts = torch.split_with_sizes(x[token], rows.tolist())
        done = [
            self._swiglu(part, w13, w2)
            for part, w13, w2 in zip(parts, self.w13.unbind(), self.w2.unbind(), strict=True)
        ]
        scaled = torch.cat(done) * weight.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(x, dtype=scaled.dtype).index_add(0, token, scaled)
        return out, balance, rows

    @staticmethod
    def _swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = F.linear(x, w13).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w2)


class Layer(nn.Module):
    """Attention and experts, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.experts = Experts(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        normed = self.post_attention_layernorm(x)
        out, balance, rows = self.experts(normed.view(-1, normed.shape[-1]))
        return x + self.dropout(out.view_as(x)), balance, rows


class MoeLanguageModel(nn.Module):
    """The whole model: embedding, layers, norm, untied head.

    Args:
        config: the model's shape.
        dropout: share of activations dropped after the embedding and in each residual branch.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal with initializer_range; what writes to the residual is scaled by 1/√(2 layers)."""
        std = self.config.initializer_range
        residual_std = std / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes_residual = name.endswith(("o_proj.weight", "experts.w2"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else std)

    def forward(self, ids: Tensor) -> tuple[Tensor, Routing]:
        """Logits (batch, tokens, vocab_size) of ids (batch, tokens), and what the routers did."""
        tokens = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:tokens], self.get_buffer("sin")[:tokens]
        x = self.dropout(self.embed_tokens(ids))
        balances, rows = [], []
        for layer in self.layers:
            x, balance, layer_rows = layer(x, cos, sin)
            balances.append(balance)
            rows.append(layer_rows)
        routing = Routing(torch.stack(balances).mean(), torch.stack(rows))
        return self.lm_head(self.norm(x)), routing
