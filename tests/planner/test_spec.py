"""ModelSpec: bytes, KV, FLOPs and errors, beyond the counts of test_families."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import catalogue
from planner.errors import InvalidInputError
from planner.spec import ModelSpec

MIXTRAL = catalogue.model("mixtral-8x7b")
CONFIG = catalogue.read_model_config("mixtral-8x7b")


def changed(**keys):
    return {**CONFIG, **keys}


def test_sixteen_bits_make_two_bytes_a_parameter():
    assert MIXTRAL.weights_bytes == 2 * MIXTRAL.total_parameters
    assert MIXTRAL.with_formats("fp32").weights_bytes == 4 * MIXTRAL.total_parameters


def test_layers_and_what_stays_on_the_device_are_all_weights():
    for name in catalogue.model_names():
        spec = catalogue.model(name)
        assert sum(spec.layer_weights_bytes) == spec.streamed_bytes_per_pass
        assert spec.streamed_bytes_per_pass + spec.resident_bytes == spec.weights_bytes


@pytest.mark.parametrize(
    ("fmt", "bits"), [("fp8", 8.002), ("int8", 8.125), ("int4", 4.156), ("mxfp4", 4.25)]
)
def test_quantised_experts_take_their_bits_and_scales(fmt, bits):
    # Experts are 97 % of Mixtral: the rest moves the mean by little.
    layer = MIXTRAL.layers[0]
    expert_bits = 8 * MIXTRAL.with_formats(fmt).layer_weights_bytes[0] / layer.total_parameters
    assert expert_bits == pytest.approx(bits, rel=0.1)


def test_mxfp4_leaves_attention_alone():
    shrunk = MIXTRAL.layer_weights_bytes[0] - MIXTRAL.with_formats("mxfp4").layer_weights_bytes[0]
    layer = MIXTRAL.layers[0]
    assert shrunk == layer.expert.total * layer.n_experts * (16 - 4.25) / 8


def test_kv_formats():
    assert MIXTRAL.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert MIXTRAL.with_formats(kv="fp8").kv_bytes_per_token == 32 * 2 * 8 * 128
    assert MIXTRAL.with_formats(kv="int8").kv_bytes_per_token == 32 * 2 * 8 * (128 + 4)
    deepseek = catalogue.model("deepseek-v3")
    assert deepseek.kv_bytes_per_token == 61 * (512 + 64) * 2


@settings(max_examples=300, deadline=None)
@given(layers=st.integers(1, 60), factor=st.integers(2, 4))
def test_twice_the_layers_are_exactly_twice_the_work(layers, factor):
    one = ModelSpec.from_config(changed(num_hidden_layers=layers))
    many = ModelSpec.from_config(changed(num_hidden_layers=layers * factor))
    for name in ("streamed_bytes_per_pass", "kv_bytes_per_token", "layers_gemm_flops_per_token"):
        assert getattr(many, name) == factor * getattr(one, name)
    assert many.attention_flops_per_token(100) == factor * one.attention_flops_per_token(100)


@settings(max_examples=300, deadline=None)
@given(context=st.integers(0, 30_000))
def test_flops_grow_by_attention_alone(context):
    grown = MIXTRAL.flops_per_token(context) - MIXTRAL.flops_per_token(0)
    assert grown == pytest.approx(context * 32 * 2 * 2 * 32 * 128)


def test_flops_without_context_are_twice_the_parameters_used():
    used = MIXTRAL.active_parameters - MIXTRAL.embedding.total - MIXTRAL.final_norm.total
    assert MIXTRAL.flops_per_token(0) == 2 * used


def test_windows_bound_what_is_read_but_not_what_is_kept():
    spec = catalogue.model("gpt-oss-20b")
    windowed = sum(layer.window_tokens is not None for layer in spec.layers)
    assert windowed == 12
    per_layer = spec.kv_bytes_per_token_per_layer
    assert spec.kv_read_bytes(1000) == per_layer * (12 * 128 + 12 * 1000)
    assert spec.kv_read_bytes(100) == spec.kv_bytes_per_token * 100


def test_attention_does_s_flops_per_bf16_byte():
    assert MIXTRAL.attention_flops_per_kv_byte == MIXTRAL.query_heads_per_kv_head == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "model_type: missing"),
        ({"model_type": "mixtrall"}, "did you mean mixtral"),
        ({"model_type": "llama"}, "not supported"),
        (changed(hidden_size=None), "hidden_size: missing"),
        (changed(hidden_size="4096"), "hidden_size: must be an integer"),
        (changed(num_local_experts=0), "num_local_experts: .*at least 1"),
        (changed(num_experts_per_tok=9), "num_experts_per_tok: .*at most the 8 experts"),
        (changed(num_key_value_heads=5), "num_key_value_heads: must divide the 32"),
        (changed(tie_word_embeddings="no"), "tie_word_embeddings: must be true or false"),
        (changed(torch_dtype="float8"), "dtype: unknown"),
        (changed(quantization_config={"quant_method": "quip"}), "quantization_config: .*quip"),
    ],
)
def test_a_wrong_configuration_is_named(config, said):
    with pytest.raises(InvalidInputError, match=said):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("section", "fmt"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            "int4",
        ),
    ],
)
def test_the_checkpoints_quantisation_is_the_weight_format(section, fmt):
    assert ModelSpec.from_config(changed(quantization_config=section)).weight_format == fmt


def test_a_checkpoints_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ModelSpec.from_directory(tmp_path).total_parameters == MIXTRAL.total_parameters


@pytest.mark.parametrize(
    ("content", "said"), [(None, "does not exist"), ("{", "not JSON"), ("[]", "no JSON object")]
)
def test_a_folder_without_a_usable_configuration_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInputError, match=said):
        ModelSpec.from_directory(tmp_path)


@pytest.mark.parametrize("fmt", ["bf61", "int3"])
def test_an_unknown_format_is_answered_with_the_nearest(fmt):
    with pytest.raises(InvalidInputError, match="did you mean"):
        MIXTRAL.with_formats(fmt)
