"""Random tiny Mixtral checkpoints, and transformers as the judge of what any checkpoint says."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The reference's top two logits may be closer than rounding: then either token is right.
TIE = {"fp32": 1e-4, "bf16": 0.05}
# So may the router's logits of the last expert that it takes and the first that it leaves: then
# either expert is right, and the logits are those of the one that the reference happened to take.
ROUTER_TIE = {"fp32": 2**-22, "bf16": 2**-6}  # relative; four units in the last place
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCH = 16

TINY: dict[str, dict[str, Any]] = {
    # One KV head for all queries; a head size that is no power of two.
    "multi-query": {"num_key_value_heads": 1, "num_attention_heads": 6, "head_dim": 48},
    # As many KV heads as query heads, and the smallest head.
    "multi-head": {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 16},
    # Every expert but one, and the largest head.
    "many-experts": {
        "num_local_experts": 5,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 1,
        "num_attention_heads": 2,
        "head_dim": 256,
    },
}
BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,  # logits far enough apart, yet not so large that BF16 is coarse
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save_tiny(directory: Path, name: str, dtype: str) -> Path:
    """The random checkpoint called `name`, with a byte-level tokenizer of its own."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(sum(name.encode()))
    model = MixtralForCausalLM(MixtralConfig(**{**BASE, **TINY[name]})).to(DTYPES[dtype])
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(["a tiny model knows few words, and none of them well"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@dataclass(frozen=True)
class Verdict:
    """Tokens that the reference would not have chosen.

    `rerouted` are those of them where an expert was chosen within rounding, `wrong` all others;
    `decided` counts the positions where the reference's top two logits are apart.
    """

    wrong: list[str]
    rerouted: int
    decided: int


@cache
def reference(directory: Path, dtype: str) -> Any:
    """transformers' model in the same dtype, with its plain implementation of attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPES[dtype], attn_implementation="eager"
    )
    return model.eval()


def judge(
    directory: Path, dtype: str, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> Verdict:
    """Every generated token against the reference's most likely one after the same tokens.

    What `generate` would do, but a tie does not make everything after it count as wrong.
    """
    model = reference(directory, dtype)
    wrong, rerouted, decided = [], 0, 0
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(outputs[i]))
    for begin in range(0, len(order), BATCH):
        indices = order[begin : begin + BATCH]
        batch = _forward(model, [prompts[i] + outputs[i] for i in indices])
        for index, (logits, margin) in zip(indices, batch, strict=True):
            made_from = slice(len(prompts[index]) - 1, -1)
            best = logits[made_from].topk(2)
            clear = best.values[:, 0] - best.values[:, 1] > TIE[dtype]
            differs = clear & (best.indices[:, 0] != torch.tensor(outputs[index]))
            flipped = differs & (margin[made_from] < ROUTER_TIE[dtype])
            decided += int(clear.sum())
            rerouted += int(flipped.sum())
            places = (differs & ~flipped).nonzero()[:, 0].tolist()
            wrong += [f"prompt {index}, token {place}" for place in places]
    return Verdict(wrong, rerouted, decided)


@torch.inference_mode()
def _forward(model: Any, sequences: Sequence[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each sequence its FP32 logits and, by position, the narrowest choice of an expert in any
    layer: the distance of the last taken from the first left, relative to the largest logit.

    All are computed as one padded batch.
    """
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    margins: list[torch.Tensor] = []
    taken = model.config.num_experts_per_tok

    def watch(router: torch.nn.Module, inputs: tuple[torch.Tensor], output: object) -> None:
        scores = torch.nn.functional.linear(inputs[0], router.weight).float()
        top = scores.reshape(*ids.shape, -1).topk(taken + 1).values
        size = scores.abs().amax(-1).reshape(ids.shape)
        margins.append((top[..., taken - 1] - top[..., taken]) / size)

    hooks = [layer.mlp.gate.register_forward_hook(watch) for layer in model.model.layers]
    logits = model(ids, attention_mask=mask).logits
    for hook in hooks:
        hook.remove()
    narrowest = torch.stack(margins).amin(0)
    return [
        (logits[row, : len(sequence)].float(), narrowest[row, : len(sequence)])
        for row, sequence in enumerate(sequences)
    ]
