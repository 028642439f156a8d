"""Training on a tiny configuration: it learns, exports, resumes, and computes what Mixtral does."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from demo.corpus import EOS_ID, Corpus, epoch_ids, load_corpus, train_tokenizer, windows
from demo.export import export
from demo.model import Experts, ModelConfig, MoeLanguageModel
from demo.train import (
    Progress,
    TrainConfig,
    Trainer,
    batches,
    learning_rate,
    parse_arguments,
    pick,
)

TINY = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    num_local_experts=4,
    max_position_embeddings=128,
)
QUICK = TrainConfig(
    steps=24,
    step_tokens=128,
    window_tokens=32,
    long_window_tokens=64,
    evaluation_tokens=64,
    dropout=0.1,
    warmup_steps=4,
    evaluation_steps=8,
    learning_rate=5e-3,
)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    rng = random.Random(0)
    words = ["crown", "night", "sword", "the", "my", "lord", "speaks", "and", "falls", "again"]
    speeches = [
        f"{rng.choice(['KATE', 'PAGE'])}:\n{' '.join(rng.choices(words, k=12)).capitalize()}."
        for _ in range(120)
    ]
    path = tmp_path / "play.txt"
    path.write_text("\n\n".join(speeches) + "\n", encoding="utf-8")
    return load_corpus(path, 0.1)


def test_a_few_steps_reduce_the_loss_and_the_export_loads(corpus, tmp_path):
    trainer = Trainer(QUICK, TINY, corpus, tmp_path / "out")
    progress = trainer.run()
    first, *_, last = [held_out for _, _, held_out in progress.history]
    assert last < first - 0.5
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(corpus.held_out[:200], return_tensors="pt").input_ids
    assert ids[0].tolist() == trainer.tokenizer.encode(corpus.held_out[:200]).ids
    with torch.no_grad():
        difference = loaded(ids).logits - trainer.model(ids)[0]
    assert difference.norm() < 0.02 * trainer.model(ids)[0].norm()  # rounding to BF16


def test_forward_and_balance_loss_equal_those_of_transformers(corpus, tmp_path):
    torch.manual_seed(3)
    model = MoeLanguageModel(TINY).eval()
    model.load_state_dict(
        {name: value.bfloat16().float() * 1.0 for name, value in model.state_dict().items()}
    )
    export(model, train_tokenizer(corpus.train, TINY.vocab_size), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(TINY.vocab_size, (3, 100))
    with torch.no_grad():
        expected = reference(ids, output_router_logits=True)
        logits, routing = model(ids)
    assert (logits - expected.logits).norm() < 1e-5 * expected.logits.norm()
    for layer, router_logits in enumerate(expected.router_logits):
        chosen = router_logits.topk(2, dim=-1).indices.flatten()
        rows = torch.bincount(chosen, minlength=TINY.num_local_experts)
        assert routing.expert_rows[layer].tolist() == rows.tolist()


@pytest.mark.parametrize("skew", [0.0, 1.0, 8.0])
def test_balance_loss_is_that_of_transformers_for_each_choice(skew):
    """transformers sums over the choices of a token, we take their mean: a factor of two."""
    torch.manual_seed(0)
    experts = Experts(TINY)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    experts.gate.weight.data[0, 0] = skew
    x = torch.randn(200, TINY.hidden_size)
    x[:, 0] = 1.0
    _, balance, rows = experts(x)
    expected = load_balancing_loss_func((experts.gate(x),), TINY.num_local_experts, top_k=2)
    assert 2 * balance.item() == pytest.approx(expected.item(), rel=1e-5)
    assert rows.sum() == 400
    assert balance.item() > (1.9 if skew == 8.0 else 0.99)


def test_resumed_run_goes_on_where_it_stopped(corpus, tmp_path):
    checkpoint = tmp_path / "run.ckpt"
    first = Trainer(QUICK, TINY, corpus, tmp_path / "out", checkpoint)
    first.run()
    longer = TrainConfig(**{**vars(QUICK), "steps": 32})
    second = Trainer(longer, TINY, corpus, tmp_path / "out", checkpoint)
    assert second.progress.step == 24
    assert second.progress.history == first.progress.history
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, torch.load(checkpoint)["model"][name])
    assert second.run().step == 32


def test_training_stops_when_the_held_out_loss_stops_falling(corpus, tmp_path):
    config = TrainConfig(**{**vars(QUICK), "steps": 500, "learning_rate": 0.0, "patience": 2})
    progress = Trainer(config, TINY, corpus, tmp_path / "out").run()
    assert (progress.best_step, progress.step) == (8, 24)


def test_learning_rate_rises_stays_and_falls_to_zero_by_steps_or_time():
    config = TrainConfig(steps=1000, minutes=10, warmup_steps=10, decay_share=0.5)
    peak = config.learning_rate
    assert learning_rate(config, 0, 0.0) == pytest.approx(peak / 10)
    assert learning_rate(config, 400, 0.0) == pytest.approx(peak)
    assert learning_rate(config, 750, 0.0) == pytest.approx(peak / 2)
    assert learning_rate(config, 100, 450.0) == pytest.approx(peak / 2)
    assert learning_rate(config, 1000, 0.0) == 0.0


def test_held_out_part_is_no_part_of_the_training_text(corpus):
    held_out = set(corpus.held_out.strip("\n").split("\n\n"))
    assert len(held_out) == 12
    assert len(corpus.train) == 108


def test_an_epoch_holds_every_speech_once_with_and_without_bpe_dropout(corpus):
    tokenizer = train_tokenizer(corpus.train, 320)
    for bpe_dropout in (0.0, 0.3):
        ids = epoch_ids(tokenizer, corpus.train, random.Random(5), bpe_dropout)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        speeches = [
            speech
            for document in text.split("<s>")
            for turn in document.split("</s>")
            for speech in turn.split("\n\n")
            if speech
        ]
        assert sorted(speeches) == sorted(corpus.train)
        assert ids[-1] == EOS_ID
    assert len(ids) > len(epoch_ids(tokenizer, corpus.train, random.Random(5), 0.0))


def test_batches_mix_short_and_long_windows_of_one_step_each(corpus):
    tokenizer = train_tokenizer(corpus.train, 320)
    endless = batches(QUICK, tokenizer, corpus, Progress())
    shapes = {tuple(next(endless).shape) for _ in range(60)}
    assert {(4, 33), (2, 65)} <= shapes  # 128 tokens each; the last of a part may be smaller
    assert {length for _, length in shapes} == {33, 65}


def test_windows_overlap_by_the_one_token_that_is_target_and_input():
    assert windows(torch.arange(10), 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows(torch.arange(12)[2:], 4).tolist() == [[2, 3, 4, 5, 6], [6, 7, 8, 9, 10]]
    with pytest.raises(ValueError, match="3 tokens has no window of 3"):
        windows(torch.arange(3), 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 24}, "head_dim=24"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    ],
)
def test_impossible_shape_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"step_tokens": 100}, "step_tokens=100"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"steps": 0}, "steps=0"),
        ({"decay_share": 0.0}, "decay_share=0.0"),
    ],
)
def test_impossible_training_option_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        TrainConfig(**changes)


def test_options_fill_both_configurations():
    arguments = parse_arguments(
        ["--text", "t", "--out", "o", "--hidden-size", "128", "--learning-rate", "0.01"]
    )
    assert pick(ModelConfig, arguments).hidden_size == 128
    assert pick(TrainConfig, arguments).learning_rate == 0.01


def test_command_writes_model_and_card(corpus, tmp_path):
    root = Path(__file__).resolve().parents[2]
    options = {**vars(QUICK), **vars(TINY), "steps": 8}
    words = [w for k, v in options.items() for w in ("--" + k.replace("_", "-"), str(v))]
    out, card = tmp_path / "out", tmp_path / "card.md"
    command = [sys.executable, str(root / "demo" / "train.py"), *words]
    command += ["--text", str(tmp_path / "play.txt"), "--out", str(out), "--report", str(card)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    assert (out / "model.safetensors").stat().st_size > 0
    text = card.read_text(encoding="utf-8")
    assert "nats per token" in text
    assert "| layer | expert 0 |" in text
    assert str(tmp_path) not in text


def test_command_names_a_missing_text(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "demo" / "train.py"), "--text", str(tmp_path / "none")]
    result = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode != 0
    assert "none" in result.stderr.splitlines()[-1]
