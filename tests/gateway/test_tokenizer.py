"""Incremental text against decoding everything at once; stop strings wherever they are cut."""

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gateway.tokenizer import (
    Detokenizer,
    SpecialTokens,
    StopMatcher,
    Tokenizer,
    TokenizerError,
)

TEXTS = ["Hello, hello world! ", "naïve café — 你好，世界 🌍🧑‍🚀 ", "один два три ", "a b  c\n\n"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and the demo model: every byte is a token."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    fast.train_from_iterator(TEXTS * 20, trainer)
    return Tokenizer(fast, SpecialTokens(frozenset([1]), {}))


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mixtral: spaces are part of the pieces, unknown characters fall to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "!", "▁a", "b", "é", "▁café"]
    vocabulary = {piece: position for position, piece in enumerate(pieces)}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(fast, SpecialTokens(frozenset([2]), {}))


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.size - 1), max_size=120))
def test_any_tokens_give_the_text_of_decoding_all_of_them(token_ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_character_is_ever_split(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        token_ids = tokenizer.encode(text, special_tokens=False)
        pieces = pieces_of(tokenizer, token_ids)
        assert "".join(pieces) == tokenizer.decode(token_ids)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_spaces_between_sentencepiece_words_are_kept() -> None:
    token_ids = [SENTENCEPIECE._fast.token_to_id(piece) for piece in ("▁Hello", "▁world", "!")]
    assert pieces_of(SENTENCEPIECE, token_ids) == ["Hello", " world", "!", ""]


def test_characters_come_as_soon_as_they_are_whole() -> None:
    token_ids = SENTENCEPIECE.encode("好", special_tokens=False)
    assert len(token_ids) == 4  # a space and three bytes
    assert pieces_of(SENTENCEPIECE, token_ids)[1:] == ["", "", "好", ""]


def test_a_long_run_of_broken_bytes_is_not_held_for_ever() -> None:
    (lone,) = [i for i in range(BYTE_LEVEL.size) if BYTE_LEVEL.token(i) == "ł"]  # byte 0x80 + …
    pieces = pieces_of(BYTE_LEVEL, [lone] * 400)
    assert any(pieces[:20])
    assert set("".join(pieces)) == {"\N{REPLACEMENT CHARACTER}"}


def test_real_byte_sequences_of_the_demo_tokenizer(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_directory(demo_model)
    draw = random.Random(5)
    for _ in range(200):
        token_ids = [draw.randrange(tokenizer.size) for _ in range(draw.randint(1, 60))]
        assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def fed(matcher: StopMatcher, pieces: list[str]) -> str:
    return "".join(matcher.push(piece) for piece in pieces) + matcher.flush()


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
    st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole, cut = StopMatcher(stops, include), StopMatcher(stops, include)
    expected, got = fed(whole, [text]), fed(cut, pieces)
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    if first is None:
        assert (got, cut.matched) == (text, None)
    elif include:
        assert text.startswith(got)
        assert got.endswith(cut.matched or "?")
    else:
        # The stop string that is complete first ends the text, so that nothing has to be held.
        assert got == expected or text.startswith(got)
        assert cut.matched is not None
        assert text[len(got) :].startswith(cut.matched)


def test_text_before_a_possible_stop_string_is_not_held() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("\n") == ""
    assert matcher.push("World") == "\n\nWorld"
    assert matcher.matched is None


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 7]}, "config.json": {}}, {2, 7}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, {5}),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, {1}),
        ({}, set()),
    ],
)
def test_end_of_sequence_ids_come_from_the_first_file_that_says(
    tmp_path: Path, files: dict[str, object], expected: set[int]
) -> None:
    BYTE_LEVEL._fast.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_directory(tmp_path).special.eos_ids == expected
