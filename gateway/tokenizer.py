"""Text to token ids and back, with the checkpoint's own tokenizer.json.

The checkpoint's files decide everything: which special tokens surround a prompt, which end an
output, and the chat template. Nothing is fetched and no code of the checkpoint is run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A character of UTF-8 has up to three bytes before its last one, each of which may decode to a
# replacement character of its own (tokenizers with byte fallback do that).
MAX_UNFINISHED_CHARACTERS = 3
# After so many tokens that end in no whole character, bytes that can no longer become one are
# given out.
PATIENCE_TOKENS = 8
# Bytes that never become text are cut off from what is decoded again at this many tokens.
MAX_WINDOW_TOKENS = 256


class TokenizerError(ValueError):
    """A checkpoint's tokenizer files are missing or cannot be used; says which and why."""


@dataclass(frozen=True)
class SpecialTokens:
    """The checkpoint's named tokens, by id and as the chat template writes them."""

    eos_ids: frozenset[int]
    names: dict[str, str]  # "bos_token" and the like → text


class Tokenizer:
    """The tokenizer of one checkpoint directory."""

    def __init__(
        self, fast: FastTokenizer, special: SpecialTokens, chat_template: str | None = None
    ) -> None:
        self._fast = fast
        self.special = special
        self.chat_template = chat_template
        vocabulary = fast.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes = max((len(text.encode()) for text in vocabulary), default=1)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the configs.

        Raises TokenizerError naming the file.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file; the checkpoint needs a tokenizer.json")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path}: {error}") from error
        # Prompts are taken as they are, however long; limits are checked elsewhere.
        fast.no_truncation()
        fast.no_padding()
        settings = _read_json(directory / "tokenizer_config.json")
        special = SpecialTokens(_eos_ids(directory, fast, settings), _named_tokens(settings))
        return cls(fast, special, _chat_template(directory, settings))

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids; `special_tokens` adds those that surround a text (such as bos)."""
        return list(self._fast.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become replacement characters."""
        return self._fast.decode(list(token_ids), skip_special_tokens=not keep_special_tokens)

    def token(self, token_id: int) -> str:
        """The token as it is written in the vocabulary ("" for an id without one)."""
        return self._fast.id_to_token(token_id) or ""

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the text's tokens that costs nothing to compute."""
        return len(text) // max(self.longest_token_bytes, 1)


class Detokenizer:
    """Text of a growing list of token ids, given out in whole characters.

        start           boundary             end
        |--- context ---|--- undecided ---|        of the window of tokens that is decoded again

    Everything up to `boundary` decodes to whole characters and has been given out. The context
    keeps what a decoder does at the start of a text (strip a space) from happening in the middle.
    What is given out adds up to `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._window: list[int] = []
        self._boundary = 0
        self._given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """Take one more token; return the characters that are certain now."""
        self._window.append(token_id)
        text = self._text()
        if not text.endswith(UNFINISHED):
            piece = text[self._given :]
            self._move_on(text)
            return piece
        if len(self._window) - self._boundary < PATIENCE_TOKENS:
            return ""
        return self._give_up_on_broken_bytes(text)

    def flush(self) -> str:
        """What is left when no more tokens come, an unfinished character included."""
        text = self._text()
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._keep_special_tokens)

    def _move_on(self, text: str) -> None:
        """The window's end becomes its boundary, what was undecided becomes its context."""
        if len(text) > self._given:
            self._window = self._window[self._boundary :]
        self._boundary = len(self._window)
        self._given = len(self._text())

    def _give_up_on_broken_bytes(self, text: str) -> str:
        certain = text.rstrip(UNFINISHED)
        held = min(len(text) - len(certain), MAX_UNFINISHED_CHARACTERS)
        end = max(len(text) - held, self._given)
        piece = text[self._given : end]
        self._given = end
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._window = self._window[-MAX_UNFINISHED_CHARACTERS:]
            self._boundary = 0
            self._given = max(len(self._text()) - held, 0)
        return piece


class StopMatcher:
    """Ends a text before the first stop string, wherever the pieces that it comes in are cut."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Take more text; return what can no longer be part of a stop string.

        Once a stop string is complete, `matched` is set and nothing more comes.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The earliest, and of those that begin together the longest.
            position, self.matched = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[: position + len(self.matched)] if self._include_stop else text[:position]
        certain = len(text) - self._possible_beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file; TokenizerError when it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return value


def _eos_ids(directory: Path, fast: FastTokenizer, settings: dict[str, Any]) -> frozenset[int]:
    """The first of generation_config.json, config.json and tokenizer_config.json that says."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return frozenset([value])
        if isinstance(value, list) and value:
            return frozenset(int(item) for item in value)
    token = _named_tokens(settings).get("eos_token")
    token_id = fast.token_to_id(token) if token else None
    return frozenset() if token_id is None else frozenset([token_id])


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The entries such as bos_token: a string, or an object with its text under "content"."""
    names = {}
    for key, value in settings.items():
        if not key.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            names[key] = content
    return names


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """The file chat_template.jinja, or the setting; of several named ones, the default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
