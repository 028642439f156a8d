"""Settings that make no sense are refused with the option's name; memory with what takes it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import memory
from gpu_worker.checkpoint import Checkpoint
from gpu_worker.config import WorkerConfig, choose_dtype, choose_kv_blocks
from gpu_worker.errors import ConfigurationError, MemoryShortage
from gpu_worker.families import DecoderConfig, family_of
from protos.serving import ServingConfig


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(ServingConfig("test", "unix:/x"), "unix:/y", Path("/model"), **settings)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"dtype": "fp16"}, "dtype"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"device": "tpu"}, "device"),
        ({"schedule": "fast"}, "schedule"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"max_sequences": -1}, "max_sequences"),
        ({"threads": 0}, "threads"),
        ({"packet_bytes": 0}, "packet_bytes"),
        ({"peer_timeout_s": 0.0}, "peer_timeout_s"),
        ({"device": "cpu", "emulate_link_bytes_per_s": float("nan")}, "emulate_link_bytes_per_s"),
        ({"device": "cpu", "emulate_device_memory_bytes": 10**9}, "emulate_device_memory"),
        ({"device": "cpu", "resident_bytes": 10**9}, "resident"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config(**settings)
    assert caught.value.field == field


def test_the_pipeline_is_chosen_where_the_device_has_memory_of_its_own() -> None:
    assert not config(device="cpu").pipelined
    assert config(device="cpu", emulate_link_bytes_per_s=1e9).pipelined
    sequential = {"schedule": "sequential", "emulate_link_bytes_per_s": 1e9}
    assert not config(device="cpu", **sequential).pipelined
    assert config(device="cpu", schedule="pipelined").pipelined


def test_fp16_weights_need_a_decision() -> None:
    assert choose_dtype(None, torch.bfloat16) is torch.bfloat16
    assert choose_dtype("fp32", torch.float16) is torch.float32
    with pytest.raises(ConfigurationError, match="dtype: the checkpoint is FP16"):
        choose_dtype(None, torch.float16)


@pytest.fixture
def decoder(checkpoint_fp32: Path) -> DecoderConfig:
    """3 layers, 2 KV heads of 16: a block of 16 tokens takes 12,288 bytes in FP32."""
    read = Checkpoint(checkpoint_fp32).config
    found: DecoderConfig = family_of(read).decoder_config(read)
    return found


def test_kv_blocks_fill_the_size_asked_for(decoder: DecoderConfig) -> None:
    assert choose_kv_blocks(config(kv_bytes=122_880), decoder, torch.float32, 0) == 10
    assert choose_kv_blocks(config(kv_bytes=122_880), decoder, torch.bfloat16, 0) == 20
    int8 = config(kv_bytes=122_880, kv_dtype="int8")  # 16 bytes and a factor of 4 a token and head
    assert choose_kv_blocks(int8, decoder, torch.bfloat16, 0) == 32
    with pytest.raises(ConfigurationError, match="kv_dtype: int8 goes with --dtype bf16"):
        choose_kv_blocks(int8, decoder, torch.float32, 0)
    with pytest.raises(ConfigurationError, match="kv: 12287 bytes hold no block of 12288"):
        choose_kv_blocks(config(kv_bytes=12_287), decoder, torch.float32, 0)


def test_kv_by_default_leaves_room_and_is_never_useless(
    decoder: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3_000_000_000)
    monkeypatch.setattr(memory, "free_shared_bytes", lambda directory: 10**12)
    few = config(max_sequences=8)
    # A quarter of 8 sequences of 512 tokens.
    assert choose_kv_blocks(few, decoder, torch.float32, 0) == 2 * 512 // 16
    many = config(max_sequences=10**6)
    blocks = choose_kv_blocks(many, decoder, torch.float32, 1_500_000_000)
    assert 0 < blocks * 12_288 < 500_000_000 * 0.4


@pytest.mark.parametrize("short_of", ["RAM", "/dev/shm"])
def test_a_kv_cache_that_does_not_fit_is_refused_with_the_items(
    short_of: str, decoder: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"RAM": 10**13, "/dev/shm": 10**13, short_of: 5 * 10**9}
    monkeypatch.setattr(memory, "available_bytes", lambda: free["RAM"])
    monkeypatch.setattr(memory, "free_shared_bytes", lambda directory: free["/dev/shm"])
    with pytest.raises(MemoryShortage) as caught:
        choose_kv_blocks(config(kv_bytes=6 * 10**9), decoder, torch.float32, 10**9)
    assert short_of in str(caught.value)
    assert "6.000 GB  KV cache" in str(caught.value)
    assert ("weights" in str(caught.value)) == (short_of == "RAM")
