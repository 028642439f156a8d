"""A checkpoint with a trap: one token, and it alone, is routed to an expert full of NaN.

Made of the demo model by surgery on the first layer. Two of the hidden dimensions no longer carry
what attention says: one is the same for every token, the other sets the trap's token apart. The
router sends to the bad expert whoever has the second, and nobody else.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.faults.load import Request

TRAP_TOKEN = 4000
BAD_EXPERT = 5
CONSTANT_DIM, TRAP_DIM = 10, 11
LAYER = "model.layers.0"
CONSTANT, TRAP = 0.1, 0.4
PULL = 500.0


def poisoned(source: Path, target: Path) -> Path:
    """Write the checkpoint; returns its directory."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    _set_apart(weights)
    expert = f"{LAYER}.block_sparse_moe.experts.{BAD_EXPERT}.w2.weight"
    weights[expert] = torch.full_like(weights[expert], float("nan"))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _set_apart(weights: dict[str, torch.Tensor]) -> None:
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, CONSTANT_DIM] = CONSTANT
    embedding[:, TRAP_DIM] = 0.0
    embedding[TRAP_TOKEN, TRAP_DIM] = TRAP
    for dim in (CONSTANT_DIM, TRAP_DIM):
        weights[f"{LAYER}.self_attn.o_proj.weight"][dim] = 0.0
    gate = weights[f"{LAYER}.block_sparse_moe.gate.weight"]
    norm = weights[f"{LAYER}.post_attention_layernorm.weight"]
    gate[BAD_EXPERT] = 0.0
    gate[BAD_EXPERT, CONSTANT_DIM] = -PULL / norm[CONSTANT_DIM]
    gate[BAD_EXPERT, TRAP_DIM] = PULL / norm[TRAP_DIM]


def harmless(request: Request) -> Request:
    """Without the trap's token, in the prompt or drawn."""
    prompt = tuple(3 if i == TRAP_TOKEN else i for i in request.prompt)
    return replace(request, prompt=prompt, banned=(TRAP_TOKEN,))
