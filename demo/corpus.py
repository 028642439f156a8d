"""Text to token ids: train and held-out split, the tokenizer, and documents for an epoch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # their positions here are their ids
PAD_ID, BOS_ID, EOS_ID = range(3)


@dataclass(frozen=True)
class Corpus:
    """A text in two parts. `train` is a list of speeches (blocks between blank lines)."""

    train: Sequence[str]
    held_out: str


def load_corpus(path: Path, held_out_share: float = 0.1) -> Corpus:
    """Reads `path` (UTF-8); the last `held_out_share` of its speeches are held out.

    Raises:
        ValueError: the share is not within (0, 1), or the text has fewer than two speeches.
    """
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share={held_out_share} must lie between 0 and 1")
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    speeches = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    if len(speeches) < 2:
        raise ValueError(f"{path}: needs at least two blocks of text with a blank line between")
    cut = min(max(1, round(len(speeches) * (1 - held_out_share))), len(speeches) - 1)
    return Corpus(speeches[:cut], "\n\n".join(speeches[cut:]) + "\n")


def train_tokenizer(speeches: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, learnt from `speeches`; any text survives a round trip.

    Raises:
        ValueError: vocab_size cannot hold the 256 bytes and the special tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} must be at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        speeches,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def split_documents(speeches: Sequence[str], rng: random.Random, longest: int) -> Iterator[str]:
    """Consecutive runs of 1 to `longest` speeches (log-uniform), as documents without BOS and EOS.

    In a fifth of them each speech ends in EOS instead of a blank line. That is the form of a chat
    (see the template in export.py): a reply to a turn that ended so ends so too.
    """
    start = 0
    while start < len(speeches):
        count = round(math.exp(rng.uniform(0, math.log(longest))))
        separator = EOS if rng.random() < 0.2 else "\n\n"
        yield separator.join(speeches[start : start + count])
        start += count


def epoch_ids(
    tokenizer: Tokenizer,
    speeches: Sequence[str],
    rng: random.Random,
    bpe_dropout: float,
    longest_document: int = 80,
) -> Tensor:
    """One pass over the speeches as a stream of ids: shuffled documents, each BOS … EOS.

    With `bpe_dropout` half of the documents are segmented with merges left out at random (Provilkov
    et al. 2020), so that a small text does not repeat itself exactly from epoch to epoch.
    """
    documents = list(split_documents(speeches, rng, longest_document))
    rng.shuffle(documents)
    half = len(documents) // 2
    plain = tokenizer.encode_batch(documents[half:])
    tokenizer.model.dropout = bpe_dropout or None
    try:
        varied = tokenizer.encode_batch(documents[:half])
    finally:
        tokenizer.model.dropout = None
    encodings = plain + varied
    rng.shuffle(encodings)
    return torch.tensor([i for encoding in encodings for i in (*encoding.ids, EOS_ID)])


def windows(stream: Tensor, length: int) -> Tensor:
    """Non-overlapping windows (count, length + 1) of a stream; the last target of one window is
    the first input of the next. A remainder shorter than a window is left out."""
    count = (stream.numel() - 1) // length
    if count == 0:
        raise ValueError(f"a text of {stream.numel()} tokens has no window of {length} tokens")
    return stream.as_strided((count, length + 1), (length, 1))


def in_batches(rows: Tensor, count: int) -> Iterator[Tensor]:
    """`rows` in order, `count` at a time; the last batch may be smaller."""
    for start in range(0, len(rows), count):
        yield rows[start : start + count]
