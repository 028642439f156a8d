"""Model families: how a checkpoint's config and tensors map onto the decoder that we execute.

A family turns config.json into a `DecoderConfig` and names, for every weight slot of the decoder,
the checkpoint tensors that fill it. Adding a family is adding a module with these three functions
and its entry in `FAMILIES`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpu_worker.errors import ConfigurationError


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a decoder-only mixture-of-experts transformer."""

    family: str
    n_layers: int
    hidden_size: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    experts_per_token: int
    expert_hidden_size: int
    vocab_size: int
    max_context_tokens: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Length of a token's query vector over all heads."""
        return self.n_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Length of a token's key (or value) vector over all heads."""
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class Slot:
    """A weight of the decoder and the checkpoint tensors that fill it.

    `shape` is (count, rows, columns) for matrices that a linear layer applies (y = x · Wᵀ; `count`
    of them: one for each expert), (rows, columns) for a table that is looked up, (n,) for a vector.
    `sources[i]` are the checkpoint tensors of matrix i, stacked along rows in this order; of a
    `swiglu` pair they are the gate and the up projection.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]
    source_shapes: tuple[tuple[int, ...], ...]  # of each tensor of one matrix; the same for all
    swiglu: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether a linear layer applies it, so that the device may store it in its own order."""
        return len(self.shape) == 3


def _families() -> dict[str, ModuleType]:
    from gpu_worker.families import mixtral

    return {"mixtral": mixtral}


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """The family module of a config.json; an unknown model_type names the nearest one."""
    families = _families()
    model_type = config.get("model_type")
    if model_type in families:
        return families[model_type]
    near = difflib.get_close_matches(str(model_type), families, n=1, cutoff=0.0)
    raise ConfigurationError(
        "model_type",
        f"{model_type!r} is not supported; supported: {', '.join(families)} (nearest: {near[0]})",
    )
