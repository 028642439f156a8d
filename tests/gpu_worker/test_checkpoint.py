"""Checkpoints that are whole are found; those that are not say what is wrong with each file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker import weights
from gpu_worker.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from gpu_worker.cpu_ops import CpuOps
from gpu_worker.errors import CheckpointError
from gpu_worker.families import family_of
from gpu_worker.ops import TorchOps


@pytest.fixture
def sharded(checkpoint_bf16: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_bf16, tmp_path / "sharded"))


@pytest.fixture
def single(checkpoint_fp32: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_fp32, tmp_path / "single"))


def load(directory: Path, ops: Any = None) -> weights.HostStore:
    checkpoint = Checkpoint(directory)
    family = family_of(checkpoint.config)
    config = family.decoder_config(checkpoint.config)
    ops = ops or TorchOps(checkpoint.dtype(), torch.device("cpu"))
    return weights.load(checkpoint, family, config, ops, weights.LoadProgress())


def problems(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return "\n".join(caught.value.problems)


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_every_tensor_of_a_sharded_checkpoint_is_located(sharded: Path) -> None:
    found = Checkpoint(sharded).tensors
    expected: dict[str, torch.Tensor] = {}
    for shard in shards(sharded):
        expected.update(load_file(shard))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].dtype == tensor.dtype


def test_missing_directory_and_files_are_named(single: Path, tmp_path: Path) -> None:
    assert "no such directory" in problems(tmp_path / "nowhere")
    (single / SINGLE_NAME).unlink()
    assert problems(single) == f"{SINGLE_NAME} is missing"
    (single / "config.json").write_text("{broken")
    assert "config.json cannot be read" in problems(single)
    (single / "config.json").unlink()
    assert problems(single) == "config.json is missing"


def test_every_missing_and_truncated_shard_is_listed(sharded: Path) -> None:
    first, second, third = shards(sharded)[:3]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-10])
    third.write_bytes(third.read_bytes()[:4])
    text = problems(sharded)
    assert f"{first.name} is missing" in text
    assert f"{second.name} is truncated" in text
    assert f"{third.name} is truncated or no safetensors file" in text


def test_a_header_that_is_no_json_is_reported(single: Path) -> None:
    content = bytearray((single / SINGLE_NAME).read_bytes())
    content[8:16] = b"garbage!"
    (single / SINGLE_NAME).write_bytes(content)
    assert f"{SINGLE_NAME} has no readable header" in problems(single)


def test_an_index_that_contradicts_the_shards_is_reported(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    name = "model.norm.weight"
    actual = index["weight_map"][name]
    other = next(s.name for s in shards(sharded) if s.name != actual)
    index["weight_map"][name] = other
    index["weight_map"]["model.invented"] = other
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    text = problems(sharded)
    assert f"puts tensor {name} in {other}; it is in {actual}" in text
    assert f"puts tensor model.invented in {other}, which does not hold it" in text


def test_an_index_may_not_name_files_elsewhere(sharded: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    assert "names a file outside" in problems(sharded)


def test_missing_tensors_and_wrong_shapes_are_listed(single: Path) -> None:
    tensors = load_file(single / SINGLE_NAME)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, single / SINGLE_NAME)
    text = problems(single)
    assert "tensor model.layers.1.self_attn.k_proj.weight is missing" in text
    assert "tensor model.norm.weight has shape [7], not [64]" in text


def test_a_type_that_cannot_be_read_is_named(single: Path) -> None:
    tensors = load_file(single / SINGLE_NAME)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, single / SINGLE_NAME)
    assert "tensor model.norm.weight is I8; supported are BF16, F32, F16" in problems(single)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtrall"}, "'mixtrall' is not supported; supported: mixtral"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"num_local_experts": -1}, "num_local_experts: must be a positive integer"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 exceeds"),
        ({"head_dim": 24}, "head_dim: must be a multiple of 16"),
        ({"hidden_act": "gelu"}, "hidden_act: must be 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ],
)
def test_a_config_that_cannot_be_run_names_the_field(
    single: Path, change: dict[str, Any], message: str
) -> None:
    from gpu_worker.errors import ConfigurationError

    config = {**json.loads((single / "config.json").read_text()), **change}
    with pytest.raises(ConfigurationError, match=message.replace("[", r"\[")):
        family_of(config).decoder_config(config)


def test_a_sliding_window_bounds_the_context(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    family = family_of(config)
    assert family.decoder_config(config).max_context_tokens == 512
    assert family.decoder_config({**config, "sliding_window": 100}).max_context_tokens == 100


def test_the_store_holds_the_checkpoints_rows(single: Path) -> None:
    tensors = load_file(single / SINGLE_NAME)
    ops = TorchOps(torch.float32, torch.device("cpu"))
    store = load(single, ops)
    prefix = "model.layers.1"
    stage = weights.BlockWeights(store.stages[0], store.stage_bytes(0), ops)
    expected = torch.cat([tensors[f"{prefix}.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(stage.linear("qkv").weight[0], expected)
    moe = "model.layers.0.block_sparse_moe.experts.3"
    expected = torch.cat([tensors[f"{moe}.w1.weight"], tensors[f"{moe}.w3.weight"]])
    assert torch.equal(stage.linear("gate_up").weight[3], expected)
    assert "qkv" not in weights.BlockWeights(store.stages[2], store.stage_bytes(2), ops)


def test_blocks_are_page_aligned_and_exact(single: Path) -> None:
    store = load(single, CpuOps(torch.bfloat16))
    starts = [store.stage_bytes(i).data_ptr() for i in range(len(store.stages))]
    assert all(start % 4096 == 0 for start in starts)
    blocks = sum(block.n_bytes for block in (store.base, *store.stages))
    assert store.n_bytes - blocks < 4096 * (1 + len(store.stages))


def test_large_tensors_pass_through_the_scratch_buffer_in_pieces(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(single, CpuOps(torch.bfloat16))
    monkeypatch.setattr(weights, "SCRATCH_BYTES", 64 * 64 * 4)
    pieces = load(single, CpuOps(torch.bfloat16))
    assert torch.equal(whole.memory, pieces.memory)


@pytest.mark.parametrize("make_ops", [CpuOps, lambda dtype: TorchOps(dtype, torch.device("cpu"))])
def test_fp16_weights_are_exact_in_fp32(single: Path, make_ops: Any) -> None:
    tensors = {name: value.half() for name, value in load_file(single / SINGLE_NAME).items()}
    save_file(tensors, single / SINGLE_NAME, {"format": "pt"})
    half = load(single, make_ops(torch.float32))
    exact = {name: value.float() for name, value in tensors.items()}
    save_file(exact, single / SINGLE_NAME, {"format": "pt"})
    assert torch.equal(half.memory, load(single, make_ops(torch.float32)).memory)


def test_progress_counts_every_byte_and_loading_can_be_stopped(single: Path) -> None:
    from gpu_worker.errors import LoadingStopped

    checkpoint = Checkpoint(single)
    family = family_of(checkpoint.config)
    config = family.decoder_config(checkpoint.config)
    ops = CpuOps(torch.float32)
    progress = weights.LoadProgress()
    weights.load(checkpoint, family, config, ops, progress)
    assert progress.loaded_bytes == progress.total_bytes > 0
    assert progress.seconds_left == 0
    with pytest.raises(LoadingStopped):
        weights.load(checkpoint, family, config, ops, weights.LoadProgress(stop=True))


def test_weights_beyond_memory_are_refused_before_they_are_loaded(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_worker import memory
    from gpu_worker.errors import MemoryShortage

    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryShortage, match=r"weights[\s\S]*headroom"):
        load(single)


def test_tied_embeddings_serve_as_head(tmp_path: Path, make_rig: Any, make_driver: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in Checkpoint(tmp_path).tensors
    driver = make_driver(make_rig(tmp_path))
    driver.generate({0: [5, 6, 7]}, 6)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    assert driver.tokens[0] == expected[0].tolist()
