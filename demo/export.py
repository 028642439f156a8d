"""Writes a trained model as an ordinary Hugging Face directory of the Mixtral architecture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo.corpus import BOS, BOS_ID, EOS, EOS_ID, PAD, PAD_ID
from demo.model import ModelConfig, MoeLanguageModel

# A message's name is its speaker; without one the role picks a name that the text knows. A turn
# ends in EOS, as in the share of training documents that corpus.split_documents makes so.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- set speakers = {'system': 'Chorus', 'user': 'First Citizen', 'assistant': 'MENENIUS'} %}"
    "{%- for message in messages %}"
    "{{- (message.name or speakers[message.role] or message.role) ~ ':\\n' }}"
    "{{- (message.content | trim) ~ eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- speakers['assistant'] ~ ':\\n' }}{%- endif %}"
)


def hugging_face_config(config: ModelConfig) -> dict[str, object]:
    """config.json as Mixtral checkpoints carry it."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **asdict(config),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
        "router_jitter_noise": 0.0,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def hugging_face_tensors(model: MoeLanguageModel) -> dict[str, Tensor]:
    """The weights in BF16 under the names of Mixtral checkpoints, one tensor for each expert."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.to(torch.bfloat16)
        if not name.startswith("lm_head."):
            name = f"model.{name}"
        moe = name.replace(".experts.", ".block_sparse_moe.")
        if name.endswith(".experts.w13"):
            prefix = moe.removesuffix("w13") + "experts"
            for expert, both in enumerate(value):
                w1, w3 = both.chunk(2)
                tensors[f"{prefix}.{expert}.w1.weight"] = w1.clone()
                tensors[f"{prefix}.{expert}.w3.weight"] = w3.clone()
        elif name.endswith(".experts.w2"):
            prefix = moe.removesuffix("w2") + "experts"
            for expert, w2 in enumerate(value):
                tensors[f"{prefix}.{expert}.w2.weight"] = w2.clone()
        else:
            tensors[moe] = value.contiguous()
    return tensors


def export(model: MoeLanguageModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes config.json, model.safetensors, tokenizer files and generation_config.json.

    Each file is replaced in one move, so that a reader never sees half of one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / "model.safetensors.partial"
    save_file(hugging_face_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file makes it readable by its owner alone
    weights.replace(directory / "model.safetensors")
    _write(directory / "config.json", _json(hugging_face_config(model.config)))
    _write(directory / "tokenizer.json", tokenizer.to_str(pretty=False))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(directory / "tokenizer_config.json", _json(tokenizer_config))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write(directory / "generation_config.json", _json(generation))


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
