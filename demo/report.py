"""The model card: figures of a training run, measured with the weights as they were written."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import textwrap

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.corpus import BOS_ID, EOS_ID
from demo.export import hugging_face_tensors
from demo.model import ModelConfig, MoeLanguageModel
from demo.train import HeldOut, Progress, Trainer, evaluate

PROMPT = "ROMEO:\n"
CHECKED_WINDOWS_TOKENS = (128, 256, 512, 1024, 2048)


@torch.no_grad()
def sample(
    model: MoeLanguageModel, tokenizer: Tokenizer, prompt: str, max_tokens: int, temperature: float
) -> str:
    """`prompt` and what the model makes of it; ends at EOS or after `max_tokens` tokens."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    for _ in range(max_tokens):
        logits, _ = model(ids)
        chosen = torch.multinomial(torch.softmax(logits[0, -1] / temperature, dim=-1), 1)
        if chosen.item() == EOS_ID:
            break
        ids = torch.cat((ids, chosen.view(1, 1)), dim=1)
    return tokenizer.decode([i for i in ids[0].tolist() if i != BOS_ID])


def active_parameters(model: MoeLanguageModel) -> int:
    """Parameters that one token uses: all but the experts that it is not routed to."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.endswith((".experts.w13", ".experts.w2"))
    )
    config = model.config
    return total - experts + experts * config.num_experts_per_tok // config.num_local_experts


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def load_table(expert_share: Tensor) -> str:
    """Share of each layer's token-expert pairs that each expert computed."""
    rows = [
        [str(layer), *(f"{share:.1%}" for share in shares)]
        for layer, shares in enumerate(expert_share.tolist())
    ]
    return table(["layer", *(f"expert {e}" for e in range(expert_share.shape[1]))], rows)


def command_line(arguments: argparse.Namespace) -> str:
    """The command that made the model, with paths reduced to their names."""
    paths = (arguments.text, arguments.out, arguments.report, arguments.checkpoint)
    names = {str(path): path.name for path in paths if path is not None}
    words = shlex.join(names.get(word, word) for word in sys.argv[1:])
    return " \\\n    ".join(textwrap.wrap(f"python demo/train.py {words}", 90))


def wrapped(markdown: str) -> str:
    """Prose and list items at most 100 columns wide; tables and code stay as they are."""
    lines, in_code = [], False
    for line in markdown.split("\n"):
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith(("|", "```")) and len(line) > 100:
            indent = "  " if line.startswith("- ") else ""
            line = textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False)
        lines.append(line)
    return "\n".join(lines)


def training_sentence(trainer: Trainer) -> str:
    """What training took, and whether it went on from a checkpoint."""
    progress = trainer.progress
    text = (
        f"plain PyTorch on {trainer.config.threads} CPU threads, "
        f"{progress.tokens_seen / 1e6:.2f} M tokens in {progress.step} steps and "
        f"{progress.seconds / 60:.0f} minutes of wall time; the weights are those of step "
        f"{progress.best_step}."
    )
    if progress.resumed_steps:
        steps = " and ".join(str(step) for step in progress.resumed_steps)
        text += f" Resumed from a checkpoint at step {steps}; earlier options may have differed."
    return text


def loss_sentence(result: HeldOut, tokens_per_character: float) -> str:
    """The loss in nats per token and per character, and as perplexity."""
    per_character = result.loss_per_token * tokens_per_character
    return (
        f"{result.loss_per_token:.3f} nats per token (perplexity "
        f"{math.exp(result.loss_per_token):.1f}; {per_character:.3f} nats per character) "
        f"over {result.tokens:,} tokens"
    )


def introduction(model: MoeLanguageModel) -> str:
    """What the model is for."""
    total = sum(p.numel() for p in model.parameters())
    return (
        f"A small Mixtral ({total / 1e6:.1f} M parameters, {active_parameters(model) / 1e6:.1f} M "
        "active per token) that writes something like Shakespeare. It exists so that the whole "
        "system runs on a real checkpoint anywhere; it knows nothing and is good for nothing else."
    )


def shape_sentence(c: ModelConfig) -> str:
    """The model's shape in words."""
    return (
        f"{c.num_hidden_layers} layers, hidden size {c.hidden_size}, {c.num_attention_heads} query "
        f"heads and {c.num_key_value_heads} KV heads of {c.head_dim}, {c.num_local_experts} "
        f"experts of which {c.num_experts_per_tok} compute a token, expert hidden size "
        f"{c.intermediate_size}, vocabulary of {c.vocab_size} (byte-level BPE), positions up to "
        f"{c.max_position_embeddings}"
    )


def write_report(arguments: argparse.Namespace, trainer: Trainer) -> None:
    """Writes the model card to `arguments.report`. Figures are those of the BF16 weights."""
    model = trainer.model.eval()
    rounded = {name: p.to(torch.bfloat16).float() for name, p in model.state_dict().items()}
    model.load_state_dict(rounded)
    lengths_tokens = sorted({*CHECKED_WINDOWS_TOKENS, trainer.config.evaluation_tokens})
    by_length = {
        n: evaluate(model, trainer.held_out, n) for n in lengths_tokens if n < len(trainer.held_out)
    }
    sections = (
        about_section(arguments, trainer),
        loss_section(trainer, by_length),
        load_section(trainer, by_length[trainer.config.evaluation_tokens]),
        sample_section(trainer),
        CHAT_SECTION,
        history_section(trainer.progress),
    )
    arguments.report.write_text(wrapped("\n".join(sections)), encoding="utf-8")


def about_section(arguments: argparse.Namespace, trainer: Trainer) -> str:
    """What the model is, what it is made from and how."""
    size_bytes = sum(t.nbytes for t in hugging_face_tensors(trainer.model).values())
    share = trainer.config.held_out_share
    return f"""# Demonstration model

{introduction(trainer.model)}

- **Directory**: `model/`, an ordinary Hugging Face directory: weights in BF16 \
({size_bytes / 1e6:.1f} MB), tensor names of Mixtral checkpoints, fast tokenizer, chat template.
- **Shape**: {shape_sentence(trainer.model.config)}.
- **Text**: {arguments.text_origin}. The last {share:.0%} of its speeches were held out: neither \
weights nor tokenizer saw them, but they chose which step's weights were kept.
- **Training**: {training_sentence(trainer)}

```
{command_line(arguments)}
```

The learning rate follows the clock as well as the steps, so another run gives other weights.
"""


def loss_section(trainer: Trainer, by_length: dict[int, HeldOut]) -> str:
    """The held-out loss, by the length of the window."""
    tokens = trainer.config.evaluation_tokens
    tokens_per_character = len(trainer.held_out) / len(trainer.corpus.held_out)
    sentence = loss_sentence(by_length[tokens], tokens_per_character)
    rows = [[str(n), f"{result.loss_per_token:.3f}"] for n, result in by_length.items()]
    return f"""## Held-out loss

{sentence}, in windows of {tokens} tokens, with the weights as shipped (rounded to BF16, \
computed in FP32). By length of the window:

{table(["window, tokens", "nats per token"], rows)}
"""


def load_section(trainer: Trainer, usual: HeldOut) -> str:
    """How evenly the routers use the experts."""
    even = 1 / trainer.model.config.num_local_experts
    return f"""## Load of the experts

Share of each layer's token-expert pairs on the held-out text (even: {even:.1%}). An auxiliary \
loss (Switch Transformer's, weight {trainer.config.balance_weight}) keeps it balanced.

{load_table(usual.expert_share)}
"""


def sample_section(trainer: Trainer) -> str:
    """A text that the model wrote."""
    torch.manual_seed(trainer.config.seed)
    text = sample(trainer.model, trainer.tokenizer, PROMPT, 200, temperature=0.8)
    return f"""## A sample

Temperature 0.8, seed {trainer.config.seed}, prompt `{PROMPT!r}`:

```
{text.strip()}
```
"""


CHAT_SECTION = """## Chat

The template writes a turn as a speech: `NAME:`, a line break, the content, the end token. A \
message's `name` is the speaker; without it `user` is First Citizen and `assistant` Menenius. A \
fifth of the training documents has this form, so replies end by themselves.
"""


def history_section(progress: Progress) -> str:
    """The losses of every evaluation."""
    rows = [[str(step), f"{a:.3f}", f"{b:.3f}"] for step, a, b in progress.history]
    return f"""## Course of training

Nats per token. The window of the held-out loss is that of the run's option at the time.

{table(["step", "training", "held out"], rows)}
"""
