"""Trains the demonstration model: `python demo/train.py --text FILE --out DIR`.

Whenever the held-out loss reaches a new low the directory is written again, so that it can be used
while training still runs and the last one written is the best one seen.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

if __package__ in (None, ""):  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.corpus import Corpus, epoch_ids, in_batches, load_corpus, train_tokenizer, windows
from demo.export import export
from demo.model import ModelConfig, MoeLanguageModel


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Every field is also an option of the command, in kebab case."""

    steps: int = field(default=3000, metadata={"help": "optimizer steps, unless time ends first"})
    minutes: float = field(
        default=60.0,
        metadata={
            "help": "wall-clock limit; the learning rate falls with whichever limit is nearer"
        },
    )
    step_tokens: int = field(default=2048, metadata={"help": "tokens in an optimizer step"})
    window_tokens: int = field(
        default=256, metadata={"help": "length of a sequence in half of the batches"}
    )
    long_window_tokens: int = field(
        default=2048, metadata={"help": "length of a sequence in the other half"}
    )
    evaluation_tokens: int = field(
        default=512, metadata={"help": "length of a sequence when the held-out loss is measured"}
    )
    learning_rate: float = field(default=1.5e-3, metadata={"help": "peak, after the warm-up"})
    decay_share: float = field(
        default=0.4,
        metadata={
            "help": "share of the run, at its end, over which the learning rate falls to zero"
        },
    )
    warmup_steps: int = field(default=50, metadata={"help": "steps of linear warm-up"})
    weight_decay: float = field(default=0.1, metadata={"help": "of every matrix"})
    dropout: float = field(default=0.2, metadata={"help": "residual and embedding dropout"})
    bpe_dropout: float = field(default=0.1, metadata={"help": "share of BPE merges left out"})
    balance_weight: float = field(default=0.1, metadata={"help": "of the load-balancing loss"})
    gradient_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to it"})
    evaluation_steps: int = field(default=50, metadata={"help": "steps between evaluations"})
    patience: int = field(
        default=10,
        metadata={
            "help": "evaluations without a new low of the held-out loss before training stops"
        },
    )
    held_out_share: float = field(default=0.1, metadata={"help": "share of the text held out"})
    threads: int = field(default=2, metadata={"help": "CPU threads"})
    seed: int = field(default=1, metadata={"help": "of weights, order and dropout"})

    def __post_init__(self) -> None:
        longest = max(self.window_tokens, self.long_window_tokens)
        if self.step_tokens < longest:
            raise ValueError(f"step_tokens={self.step_tokens} must be at least {longest}")
        at_least_one = (
            "steps",
            "window_tokens",
            "evaluation_tokens",
            "evaluation_steps",
            "patience",
        )
        for name in (*at_least_one, "long_window_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"decay_share={self.decay_share} must lie in (0, 1]")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")


@dataclass(frozen=True)
class HeldOut:
    """Result of an evaluation on text that training never saw."""

    loss_per_token: float  # nats
    tokens: int
    expert_share: Tensor  # (layers, experts), share of the layer's token-expert pairs


@dataclass
class Progress:
    """Where a training run stands; all that a checkpoint keeps besides weights and optimizer."""

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    resumed_steps: list[int] = field(default_factory=list)
    best_step: int = 0
    best_loss: float = math.inf
    # step, mean training loss since the evaluation before, held-out loss
    history: list[tuple[int, float, float]] = field(default_factory=list)


@torch.no_grad()
def evaluate(model: MoeLanguageModel, stream: Tensor, window_tokens: int) -> HeldOut:
    """Mean next-token loss over non-overlapping windows of `stream`, and the experts' load."""
    was_training = model.training
    model.eval()
    loss_sum, tokens, rows = 0.0, 0, None
    for batch in in_batches(windows(stream, window_tokens), 8):
        logits, routing = model(batch[:, :-1])
        targets = batch[:, 1:].reshape(-1)
        loss_sum += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
        tokens += targets.numel()
        rows = routing.expert_rows if rows is None else rows + routing.expert_rows
    model.train(was_training)
    assert rows is not None
    return HeldOut(loss_sum / tokens, tokens, rows / rows.sum(dim=1, keepdim=True))


def share_done(config: TrainConfig, step: int, elapsed_s: float) -> float:
    """How far a run is, 0 to 1: whichever of steps and minutes is further along."""
    return min(1.0, max(step / config.steps, elapsed_s / (config.minutes * 60)))


def learning_rate(config: TrainConfig, step: int, elapsed_s: float) -> float:
    """Linear warm-up, constant, then linear to zero over the last `decay_share` of the run."""
    done = share_done(config, step, elapsed_s)
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    return config.learning_rate * warmup * min(1.0, (1 - done) / config.decay_share)


def batches(
    config: TrainConfig, tokenizer: Tokenizer, corpus: Corpus, progress: Progress
) -> Iterator[Tensor]:
    """Endless (sequences, length + 1) batches of about `step_tokens`; every epoch is cut anew,
    half of it into short windows and half into long ones.

    Epochs that begin while the learning rate falls are without BPE dropout: what the model settles
    on is text as it will meet it.
    """
    # A resumed run does not repeat the order of the epoch in which it stopped
    rng = random.Random(config.seed + progress.step)
    while True:
        settling = share_done(config, progress.step, progress.seconds) > 1 - config.decay_share
        bpe_dropout = 0.0 if settling else config.bpe_dropout
        stream = epoch_ids(tokenizer, corpus.train, rng, bpe_dropout)
        cut = len(stream) // 2
        parts = [(stream[:cut], config.window_tokens), (stream[cut:], config.long_window_tokens)]
        epoch = [
            batch
            for part, length in parts
            for batch in _shuffled_batches(part, length, config.step_tokens // length, rng)
        ]
        yield from rng.sample(epoch, len(epoch))


def _shuffled_batches(
    stream: Tensor, length: int, count: int, rng: random.Random
) -> Iterator[Tensor]:
    """Windows of `length` tokens from a random offset on, in random order, `count` at a time."""
    rows = windows(stream[rng.randrange(max(1, min(length, len(stream) - length))) :], length)
    yield from in_batches(rows[rng.sample(range(len(rows)), len(rows))], count)


def make_optimizer(model: MoeLanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def train_step(
    model: MoeLanguageModel, optimizer: torch.optim.Optimizer, batch: Tensor, config: TrainConfig
) -> float:
    """One optimizer step; returns the mean loss per token in nats, without the balance loss."""
    logits, routing = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].reshape(-1))
    (loss + config.balance_weight * routing.balance_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


class Trainer:
    """A training run that can stop at any evaluation and go on from its checkpoint.

    Args:
        config, model_config: how and what to train.
        corpus: the text; the tokenizer is learnt from its training part.
        out: the model's directory, rewritten at every new low of the held-out loss.
        checkpoint: file that each evaluation writes; if it exists the run starts from it.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_config: ModelConfig,
        corpus: Corpus,
        out: Path,
        checkpoint: Path | None = None,
    ) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config, self.corpus, self.out, self.checkpoint = config, corpus, out, checkpoint
        self.tokenizer = train_tokenizer(corpus.train, model_config.vocab_size)
        self.held_out = torch.tensor(self.tokenizer.encode(corpus.held_out).ids)
        self.model = MoeLanguageModel(model_config, config.dropout)
        self.optimizer = make_optimizer(self.model, config)
        self.progress = Progress()
        self.best_state = self.model.state_dict()
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint)

    def run(self) -> Progress:
        """Trains until steps, minutes or patience end; the model then has its best weights."""
        config, progress = self.config, self.progress
        losses: list[float] = []
        start_s = time.monotonic() - progress.seconds
        for batch in batches(config, self.tokenizer, self.corpus, progress):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(config, progress.step, progress.seconds)
            losses.append(train_step(self.model, self.optimizer, batch, config))
            progress.step += 1
            progress.tokens_seen += batch[:, 1:].numel()
            progress.seconds = time.monotonic() - start_s
            last = progress.step >= config.steps or progress.seconds >= config.minutes * 60
            if last or progress.step % config.evaluation_steps == 0:
                self._evaluate(sum(losses) / len(losses))
                losses.clear()
                overdue = progress.step - progress.best_step
                if last or overdue >= config.patience * config.evaluation_steps:
                    break
        self.model.load_state_dict(self.best_state)
        self.model.eval()
        return progress

    def _evaluate(self, train_loss: float) -> None:
        """Measures the held-out loss; exports at a new low; writes the checkpoint."""
        progress = self.progress
        result = evaluate(self.model, self.held_out, self.config.evaluation_tokens)
        progress.history.append((progress.step, train_loss, result.loss_per_token))
        log_progress(progress, result)
        if result.loss_per_token < progress.best_loss:
            progress.best_loss, progress.best_step = result.loss_per_token, progress.step
            self.best_state = copy.deepcopy(self.model.state_dict())
            export(self.model, self.tokenizer, self.out)
        if self.checkpoint is not None:
            state = {
                "model": self.model.state_dict(),
                "best": self.best_state,
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(progress),
            }
            partial = self.checkpoint.with_name(self.checkpoint.name + ".partial")
            torch.save(state, partial)
            partial.replace(self.checkpoint)

    def _resume(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_state = state["best"]
        self.progress = Progress(**state["progress"])
        self.progress.resumed_steps.append(self.progress.step)
        torch.manual_seed(self.config.seed + self.progress.step)


def log_progress(progress: Progress, result: HeldOut) -> None:
    """One line of progress."""
    step, train_loss, held_out_loss = progress.history[-1]
    low, high = result.expert_share.min().item(), result.expert_share.max().item()
    print(
        f"step {step}  train {train_loss:.3f}  held out {held_out_loss:.3f}  "
        f"expert load {low:.1%} to {high:.1%}  {progress.tokens_seen / 1e6:.2f} M tokens  "
        f"{progress.seconds / 60:.1f} min",
        flush=True,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's options; defaults and help come from the two configuration classes."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to learn")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--report", type=Path, help="also write a model card (Markdown) here")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and to save to")
    parser.add_argument(
        "--text-origin",
        default="from the plays of William Shakespeare (public domain), the tinyshakespeare file",
        help="where the text is from, for the model card",
    )
    for option in (*fields(TrainConfig), *fields(ModelConfig)):
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=type(option.default),
            default=option.default,
            help=option.metadata.get("help", "as in config.json"),
        )
    return parser.parse_args(arguments)


def pick(kind: Any, arguments: argparse.Namespace) -> Any:
    """The configuration dataclass `kind`, filled from the options of the same names."""
    return kind(**{option.name: getattr(arguments, option.name) for option in fields(kind)})


def main() -> None:
    """Command line."""
    arguments = parse_arguments()
    try:
        config, model_config = pick(TrainConfig, arguments), pick(ModelConfig, arguments)
        corpus = load_corpus(arguments.text, config.held_out_share)
        trainer = Trainer(config, model_config, corpus, arguments.out, arguments.checkpoint)
        trainer.run()
    except (OSError, ValueError) as error:
        sys.exit(f"train.py: {error}")
    if arguments.report:
        from demo.report import write_report

        write_report(arguments, trainer)


if __name__ == "__main__":
    main()
