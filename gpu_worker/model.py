"""The decoder, cut where the CPU's attention goes in: GA, then attention elsewhere, then GB."""

import torch

from gpu_worker.families import DecoderConfig
from gpu_worker.ops import Ops, RotaryTable
from gpu_worker.timing import OpTimes
from gpu_worker.weights import BlockWeights

Tensor = torch.Tensor


class Decoder:
    """A model's forward pass in pieces; it holds no weights and no state of any sequence."""

    def __init__(self, config: DecoderConfig, ops: Ops) -> None:
        self.config = config
        self._ops = ops
        self._rotary = RotaryTable.build(
            config.max_context_tokens, config.head_dim, config.rope_theta, ops.device
        )

    @property
    def op_times(self) -> OpTimes:
        """What its operations took so far, by kind."""
        return self._ops.times

    def embed(self, base: BlockWeights, token_ids: Tensor) -> Tensor:
        """Hidden states (tokens, hidden) of token ids (tokens,)."""
        return self._ops.embed(base.vector("embedding"), token_ids)

    def attention_in(
        self, x: Tensor, weights: BlockWeights, positions: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """GA: norm, QKV, rotary. Writes q (tokens, q heads, dim), k and v (…, kv heads, dim)."""
        config, ops = self.config, self._ops
        normed = ops.rms_norm(x, weights.vector("input_norm"), config.norm_epsilon)
        qkv = ops.project(normed, weights.linear("qkv"))
        ops.rotate_split(qkv, positions, self._rotary, q, k, v)

    def attention_out(self, x: Tensor, attention: Tensor, weights: BlockWeights) -> Tensor:
        """GB: O projection, residual, norm, router, experts. attention is (tokens, q heads, dim);
        x may be overwritten."""
        ops = self._ops
        attended = attention.reshape(len(x), self.config.q_size)
        x = ops.project_add(attended, weights.linear("o"), x)
        normed = ops.rms_norm(x, weights.vector("post_norm"), self.config.norm_epsilon)
        return ops.experts_add(
            normed,
            weights.linear("router"),
            weights.linear("gate_up"),
            weights.linear("down"),
            self.config.experts_per_token,
            x,
        )

    def logits(self, base: BlockWeights, x: Tensor) -> Tensor:
        """FP32 logits (rows, vocabulary) of the last layer's hidden states (rows, hidden)."""
        normed = self._ops.rms_norm(x, base.vector("final_norm"), self.config.norm_epsilon)
        return self._ops.logits(normed, base.linear("head"))

    def argmax(self, logits: Tensor) -> Tensor:
        """Each row's most likely token (the first of equals); -1 where a row has a NaN."""
        return self._ops.argmax(logits)
