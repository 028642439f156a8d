"""The shipped checkpoint, judged through transformers: shape, size, routing, and what it learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# The Taming of the Shrew, III.2: held out of training (public domain)
PASSAGE = """\
KATHARINA:
Nay, then,
Do what thou canst, I will not go to-day;
No, nor to-morrow, not till I please myself.
The door is open, sir; there lies your way;
You may be jogging whiles your boots are green;
For me, I'll not be gone till I please myself:
'Tis like you'll prove a jolly surly groom,
That take it on you at the first so roundly.

PETRUCHIO:
O Kate, content thee; prithee, be not angry.

KATHARINA:
I will be angry: what hast thou to do?
Father, be quiet; he shall stay my leisure.

GREMIO:
Ay, marry, sir, now it begins to work.

KATARINA:
Gentlemen, forward to the bridal dinner:
I see a woman may be made a fool,
If she had not a spirit to resist.
"""
HELD_OUT_LIMIT = 3.8  # nats per token; an untrained model of this vocabulary has 8.3


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((MODEL / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shapes() -> dict[str, list[int]]:
    with safe_open(MODEL / "model.safetensors", framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in list(tensors.keys())}
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
        return {name: part.get_shape() for name, part in slices.items()}


@pytest.fixture(scope="module")
def model() -> MixtralForCausalLM:
    model, loading = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@torch.no_grad()
def loss_per_token(model: MixtralForCausalLM, ids: torch.Tensor) -> float:
    """Mean next-token loss of ids (1, tokens) in nats."""
    return F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:]).item()


def test_directory_has_every_file_and_is_at_most_40_MB():
    assert set(FILES) <= {path.name for path in MODEL.iterdir()}
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 40e6


def test_shape_is_what_the_system_is_tried_on(config):
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert config["num_hidden_layers"] >= 8
    assert config["num_local_experts"] == 8
    assert config["num_experts_per_tok"] == 2
    assert config["num_attention_heads"] == 4 * config["num_key_value_heads"]
    assert config["head_dim"] % 16 == 0
    assert config["max_position_embeddings"] == 2048


def test_parameter_count_lies_between_10_and_20_million(shapes):
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert 10e6 <= count <= 20e6


def test_tensor_names_are_those_of_mixtral_checkpoints(config, shapes):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    expected = {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        expected |= {f"{prefix}.{x}_layernorm.weight" for x in ("input", "post_attention")}
        expected |= {f"{prefix}.self_attn.{x}_proj.weight" for x in "qkvo"}
        expected.add(f"{prefix}.block_sparse_moe.gate.weight")
        for expert in range(config["num_local_experts"]):
            name = f"{prefix}.block_sparse_moe.experts.{expert}"
            expected |= {f"{name}.{x}.weight" for x in ("w1", "w2", "w3")}
            assert shapes[f"{name}.w1.weight"] == [inner, hidden]
            assert shapes[f"{name}.w2.weight"] == [hidden, inner]
    assert set(shapes) == expected


def test_special_tokens_agree_between_config_and_tokenizer(config, tokenizer):
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    for kind in ("bos", "eos", "pad"):
        assert config[f"{kind}_token_id"] == getattr(tokenizer, f"{kind}_token_id")
        assert generation[f"{kind}_token_id"] == config[f"{kind}_token_id"]
    assert tokenizer("Speak.").input_ids[0] == config["bos_token_id"]
    assert len(tokenizer) == config["vocab_size"]


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_tokenizer_gives_back_any_text(text):
    tokenizer = _fast_tokenizer()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def _fast_tokenizer(cache: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006 (one per session)
    if not cache:
        cache.append(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    return cache[0]


def test_tokenizer_compresses_its_own_kind_of_text(tokenizer):
    assert len(PASSAGE) / len(tokenizer(PASSAGE).input_ids) > 2.5


def test_held_out_passage_is_far_likelier_than_its_shuffled_tokens(model, tokenizer):
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))
    loss = loss_per_token(model, ids)
    assert loss < HELD_OUT_LIMIT
    assert loss + 1.5 < loss_per_token(model, ids[:, order])


def test_bf16_computation_agrees_with_fp32(model, tokenizer):
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    low = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    assert loss_per_token(low, ids) == pytest.approx(loss_per_token(model, ids), abs=0.02)


def test_context_beyond_512_tokens_does_not_break_the_model(model, tokenizer):
    """Copies of the passage: tokens at positions beyond 1,024 must still be predicted well."""
    ids = tokenizer(PASSAGE * 10, return_tensors="pt", truncation=True, max_length=2048).input_ids
    with torch.no_grad():
        logits = model(ids).logits[0]
    late = F.cross_entropy(logits[1023:-1], ids[0, 1024:]).item()
    assert ids.shape[1] > 2000
    assert late < HELD_OUT_LIMIT + 0.5


def test_every_expert_of_every_layer_gets_load(model, tokenizer, config):
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    with torch.no_grad():
        router_logits = model(ids, output_router_logits=True).router_logits
    assert len(router_logits) == config["num_hidden_layers"]
    for layer in router_logits:
        chosen = layer.topk(config["num_experts_per_tok"], dim=-1).indices.flatten()
        share = torch.bincount(chosen, minlength=config["num_local_experts"]) / chosen.numel()
        assert share.min() > 0.02
        assert share.max() < 0.35


def test_sampled_text_looks_like_a_play(model, tokenizer):
    """A speech of several lines of known words, then the next speaker's name."""
    prompt = tokenizer("First Citizen:\n", return_tensors="pt")
    torch.manual_seed(0)
    out = model.generate(
        **prompt, min_new_tokens=200, max_new_tokens=200, do_sample=True, temperature=0.7
    )
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    assert "\n\n" in text
    assert any(line.endswith(":") for line in text.splitlines()[1:])
    known = {"the", "and", "to", "of", "I", "my", "you", "is", "a", "in"}
    assert sum(word in known for word in text.split()) >= 10


def test_chat_template_writes_turns_as_speeches(tokenizer):
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Rome. A street."},
            {"role": "user", "content": " Who art thou? "},
            {"role": "assistant", "name": "CORIOLANUS", "content": "A soldier."},
            {"role": "user", "content": "Speak."},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<s>Chorus:\nRome. A street.</s>First Citizen:\nWho art thou?</s>"
        "CORIOLANUS:\nA soldier.</s>First Citizen:\nSpeak.</s>MENENIUS:\n"
    )
