"""What a row's streams delivered, as OpenAI's response body."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moelens.v1 import gateway_pb2 as messages
from moelens.v1.common_pb2 import TokenLogprobs

from gateway.batch.rows import Row

FINISH_REASONS = {
    messages.FINISH_REASON_STOP: "stop",
    messages.FINISH_REASON_LENGTH: "length",
}


@dataclass
class Choice:
    """One output of one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class Collected:
    """Everything that one request's stream said."""

    def __init__(self) -> None:
        self.model = ""
        self.prompt_tokens = 0
        self.echo = ""
        self.choices: dict[int, Choice] = {}

    def take(self, event: messages.GenerateResponse) -> int:
        """Add one event; return how many tokens it brought."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self.model = event.started.model
            self.prompt_tokens = event.started.prompt_tokens
        elif kind == "prompt":
            self.echo = event.prompt.text
        elif kind == "tokens":
            choice = self.choices.setdefault(event.tokens.index, Choice())
            choice.text += event.tokens.text
            choice.token_ids.extend(event.tokens.token_ids)
            choice.logprobs.extend(event.tokens.logprobs)
            return len(event.tokens.token_ids)
        elif kind == "finished":
            choice = self.choices.setdefault(event.finished.index, Choice())
            choice.finish_reason = FINISH_REASONS.get(event.finished.reason)
        return 0

    @property
    def generated_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def logprob_ids(self) -> Iterator[int]:
        """Every token id whose text the logprobs need."""
        for choice in self.choices.values():
            for entry in choice.logprobs:
                yield entry.token_id
                yield from entry.top_token_ids


def record_id(custom_id: str) -> str:
    """The same for the same row, so that a resumed batch gives what an undisturbed one gives."""
    return f"batch_req_{hashlib.blake2b(custom_id.encode(), digest_size=12).hexdigest()}"


def response_body(
    row: Row, collected: list[Collected], token_texts: dict[int, str], created_s: int
) -> dict[str, Any]:
    """The body of a completion; `token_texts` has the text of each id that the logprobs name."""
    prompt_tokens = sum(entry.prompt_tokens for entry in collected)
    generated = sum(entry.generated_tokens for entry in collected)
    prefix, kind = ("chatcmpl", "chat.completion") if row.chat else ("cmpl", "text_completion")
    make = _chat_choice if row.chat else _text_choice
    choices = [
        (entry, choice) for entry in collected for _, choice in sorted(entry.choices.items())
    ]
    return {
        "id": f"{prefix}-{record_id(row.custom_id).removeprefix('batch_req_')}",
        "object": kind,
        "created": created_s,
        "model": collected[0].model,
        "choices": [
            {"index": index, **make(entry, choice, token_texts)}
            for index, (entry, choice) in enumerate(choices)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }


def _chat_choice(entry: Collected, choice: Choice, texts: dict[int, str]) -> dict[str, Any]:
    content = [
        {
            **_token(logprobs.token_id, logprobs.logprob, texts),
            "top_logprobs": [
                _token(token_id, logprob, texts) for token_id, logprob in _alternatives(logprobs)
            ],
        }
        for logprobs in choice.logprobs
    ]
    return {
        "message": {"role": "assistant", "content": choice.text},
        "logprobs": {"content": content} if content else None,
        "finish_reason": choice.finish_reason,
    }


def _token(token_id: int, logprob: float, texts: dict[int, str]) -> dict[str, Any]:
    text = texts[token_id]
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _alternatives(logprobs: TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)


def _text_choice(entry: Collected, choice: Choice, texts: dict[int, str]) -> dict[str, Any]:
    return {
        "text": entry.echo + choice.text,
        "logprobs": _text_logprobs(choice, texts) if choice.logprobs else None,
        "finish_reason": choice.finish_reason,
    }


def _text_logprobs(choice: Choice, texts: dict[int, str]) -> dict[str, Any]:
    tokens = [texts[entry.token_id] for entry in choice.logprobs]
    offsets, position = [], 0
    for token in tokens:
        offsets.append(position)
        position += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in choice.logprobs],
        "top_logprobs": [
            {texts[token_id]: logprob for token_id, logprob in _alternatives(entry)}
            for entry in choice.logprobs
        ],
        "text_offset": offsets,
    }
