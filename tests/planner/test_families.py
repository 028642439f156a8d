"""Parameter counts of every family against the modules that transformers builds (meta device)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from planner.catalogue import model_names, read_model_config
from planner.spec import ModelSpec

# Small but odd: no two sizes equal, so that a swapped pair cannot cancel out.
COMMON = {
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 512,
}
MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 40,
    "intermediate_size": 130,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"intermediate_size": 72, "num_local_experts": 7, "num_experts_per_tok": 3}),
    (
        "mixtral",
        {
            "intermediate_size": 72,
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    ),
    (
        "qwen2_moe",
        {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "intermediate_size": 130,
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    (
        "qwen2_moe",
        {
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "qkv_bias": False,
        },
    ),
    (
        "qwen3_moe",
        {
            "moe_intermediate_size": 40,
            "intermediate_size": 130,
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "head_dim": 32,
            "attention_bias": True,
            "mlp_only_layers": [0, 3],
        },
    ),
    ("olmoe", {"intermediate_size": 40, "num_experts": 9, "num_experts_per_tok": 4}),
    (
        "phimoe",
        {
            "intermediate_size": 40,
            "num_local_experts": 9,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    (
        "granitemoe",
        {
            "intermediate_size": 40,
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
    ),
    (
        "gpt_oss",
        {
            "intermediate_size": 40,
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "head_dim": 24,
            "sliding_window": 64,
        },
    ),
    (
        "glm4_moe",
        {
            "moe_intermediate_size": 40,
            "intermediate_size": 130,
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 24,
        },
    ),
    (
        "minimax_m2",
        {
            "intermediate_size": 40,
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "head_dim": 24,
        },
    ),
    ("deepseek_v2", {**MLA, "q_lora_rank": None, "first_k_dense_replace": 1}),
    ("deepseek_v2", {**MLA, "q_lora_rank": 28, "attention_bias": True, "n_shared_experts": 3}),
    ("deepseek_v3", {**MLA, "q_lora_rank": 28, "first_k_dense_replace": 3}),
]
CASES = [
    *((f"{name}-{i}", {"model_type": name, **COMMON, **c}) for i, (name, c) in enumerate(VARIANTS)),
    (
        "dbrx-small",
        {
            "model_type": "dbrx",
            "d_model": 96,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 512,
            "vocab_size": 211,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 96,
                "ffn_hidden_size": 40,
                "moe_num_experts": 9,
                "moe_top_k": 4,
            },
        },
    ),
    *((name, read_model_config(name)) for name in model_names()),
]


def reference_model(config: dict[str, Any]) -> torch.nn.Module:
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    hf = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(hf)


def is_routed(name: str) -> bool:
    return ".experts." in name


@pytest.fixture(scope="module")
def parameters() -> Callable[[str, dict[str, Any]], dict[str, int]]:
    """Parameter sizes by name of the reference model; models are built once per configuration."""
    built: dict[str, dict[str, int]] = {}

    def sizes(label: str, config: dict[str, Any]) -> dict[str, int]:
        if label not in built:
            model = reference_model(json.loads(json.dumps(config)))
            built[label] = {name: p.numel() for name, p in model.named_parameters()}
        return built[label]

    return sizes


@pytest.mark.parametrize(("label", "config"), CASES, ids=[label for label, _ in CASES])
class TestAgainstTransformers:
    def test_total_parameters_are_exact(self, label, config, parameters):
        assert ModelSpec.from_config(config).total_parameters == sum(
            parameters(label, config).values()
        )

    def test_active_parameters_count_each_used_expert_once(self, label, config, parameters):
        spec = ModelSpec.from_config(config)
        sizes = parameters(label, config)
        routed = sum(size for name, size in sizes.items() if is_routed(name))
        expected = sum(sizes.values()) - routed + routed * spec.experts_per_token // spec.n_experts
        assert spec.active_parameters == expected

    def test_each_layer_is_exact(self, label, config, parameters):
        spec = ModelSpec.from_config(config)
        by_layer = [0] * spec.n_layers
        for name, size in parameters(label, config).items():
            digits = [part for part in name.split(".") if part.isdigit()]
            if digits:
                by_layer[int(digits[0])] += size
        assert [layer.total_parameters for layer in spec.layers] == by_layer

    def test_kinds_sum_to_the_total_and_match(self, label, config, parameters):
        spec = ModelSpec.from_config(config)
        sizes = parameters(label, config)
        kinds = spec.parameters_by_kind
        assert sum(kinds.values()) == spec.total_parameters
        routed = sum(size for name, size in sizes.items() if is_routed(name))
        assert kinds["routed_experts"] == routed
        shared = sum(size for name, size in sizes.items() if "shared_expert" in name)
        assert kinds["shared_expert"] == shared
