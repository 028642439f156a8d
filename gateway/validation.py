"""A GenerateRequest checked field by field and made ready for the engine.

Every error names the field by its path in the request and says what would be right.
"""

import json
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moelens.v1 import gateway_pb2 as messages
from moelens.v1.common_pb2 import SamplingParams

from gateway.chat import ChatError, ChatTemplate, Message
from gateway.tokenizer import Tokenizer
from gateway.worker import WorkerInfo
from protos.errors import InvalidArgument, NotFound, ResourceExhausted

MAX_OUTPUTS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 256
MAX_LOGPROBS = 64
MAX_LOGIT_BIASES = 4096
MAX_ID_CHARACTERS = 256
# More than any template takes, and less than what the parser's stack takes.
MAX_JSON_BRACKETS = 256


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt may be at most."""

    max_text_bytes: int = 8 * 2**20


@dataclass(frozen=True)
class CheckedRequest:
    """What the service works from."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    outputs: int
    seed: int
    sampling: SamplingParams  # without seed; stop_token_ids holds every id that ends an output
    stop: tuple[str, ...]
    include_stop: bool
    echo: bool
    keep_special_tokens: bool
    batch: bool
    # Ids among sampling.stop_token_ids whose text is no part of the output.
    silent_stop_ids: frozenset[int]


class Validator:
    """Checks requests against one model. Raises the errors that a client sees."""

    def __init__(
        self, model: str, info: WorkerInfo, tokenizer: Tokenizer, limits: PromptLimits
    ) -> None:
        self._model = model
        self._info = info
        self._tokenizer = tokenizer
        self._limits = limits
        source = tokenizer.chat_template
        self._template = ChatTemplate(source, tokenizer.special.names) if source else None

    def check(self, request: messages.GenerateRequest) -> CheckedRequest:
        """Everything about a request that does not depend on others."""
        self.check_model(request.model)
        _require(len(request.request_id) <= MAX_ID_CHARACTERS, "request_id", "is too long")
        self._check_outputs(request)
        self._check_sampling(request.sampling)
        prompt_ids = self.prompt_ids(request)
        max_tokens = self._max_tokens(request, len(prompt_ids))
        if request.sampling.min_tokens > max_tokens:
            problem = f"is {request.sampling.min_tokens}, max_tokens is {max_tokens}"
            raise InvalidArgument(problem, field="sampling.min_tokens")
        sampling = self._effective(request.sampling)
        return CheckedRequest(
            request_id=request.request_id or f"gen-{secrets.token_hex(8)}",
            prompt_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            outputs=request.n if request.HasField("n") else 1,
            seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
            sampling=sampling,
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            echo=request.echo,
            keep_special_tokens=request.keep_special_tokens,
            batch=request.priority == messages.PRIORITY_BATCH,
            silent_stop_ids=frozenset(
                () if request.include_stop else request.sampling.stop_token_ids
            ),
        )

    def check_model(self, model: str) -> None:
        """NotFound unless it is the one served."""
        if model not in ("", self._model):
            raise NotFound(f"{model[:200]!r} is not served here; {self._model!r} is", field="model")

    def prompt_ids(self, request: messages.GenerateRequest | messages.TokenizeRequest) -> list[int]:
        """Token ids of whichever prompt the request holds."""
        kind = request.WhichOneof("prompt")
        if kind == "text":
            _require(bool(request.text), "text", "is empty; expected at least one character")
            ids = self._encode("text", request.text, not request.no_special_tokens)
        elif kind == "token_ids":
            ids = list(request.token_ids.ids)  # type: ignore[union-attr]
            self.check_ids("token_ids.ids", ids)
        elif kind == "chat":
            ids = self._encode("chat", self._render(request.chat), special_tokens=False)
        else:
            raise InvalidArgument("is missing; set text, token_ids or chat", field="prompt")
        _require(len(ids) > 0, kind, "is empty; expected at least one token")
        return ids

    def check_ids(self, field: str, ids: Iterable[int]) -> None:
        """Every id has to be in the vocabulary."""
        size = self._info.vocab_size
        for position, token_id in enumerate(ids):
            if token_id >= size:
                raise InvalidArgument(
                    f"id {token_id} at position {position} is not in the vocabulary of {size}",
                    field=field,
                )

    def _encode(self, field: str, text: str, special_tokens: bool) -> list[int]:
        size_bytes = len(text.encode())
        if size_bytes > self._limits.max_text_bytes:
            raise ResourceExhausted(
                f"is {size_bytes} bytes long, this server takes {self._limits.max_text_bytes}",
                field=field,
                reason="PROMPT_TOO_LARGE",
            )
        # Refused before the work of tokenizing it.
        fewest = self._tokenizer.fewest_tokens(text)
        if fewest >= self._info.context_tokens:
            raise self._too_long(field, f"at least {fewest}")
        return self._tokenizer.encode(text, special_tokens)

    def _render(self, chat: messages.Chat) -> str:
        if self._template is None:
            raise InvalidArgument("this checkpoint has no chat template; use text", field="chat")
        turns = [Message(message.role, message.content) for message in chat.messages]
        try:
            return self._template.render(
                turns,
                generation_prompt=not chat.no_generation_prompt,
                arguments=_json_object(chat.template_arguments_json),
            )
        except ChatError as error:
            raise InvalidArgument(str(error), field="chat") from error

    def _too_long(self, field: str, tokens: str) -> InvalidArgument:
        return InvalidArgument(
            f"has {tokens} tokens; with one generated token at least, the context of "
            f"{self._info.context_tokens} is exceeded",
            field=field,
        )

    def _max_tokens(self, request: messages.GenerateRequest, prompt_tokens: int) -> int:
        room = self._info.context_tokens - prompt_tokens
        if room < 1:
            raise self._too_long(request.WhichOneof("prompt") or "prompt", str(prompt_tokens))
        if not request.HasField("max_tokens"):
            return room
        _require(request.max_tokens >= 1, "max_tokens", "is 0; expected 1 or more")
        if request.max_tokens > room:
            raise InvalidArgument(
                f"is {request.max_tokens}; {prompt_tokens} prompt tokens leave room for {room} in "
                f"the context of {self._info.context_tokens}",
                field="max_tokens",
            )
        return request.max_tokens

    def _check_outputs(self, request: messages.GenerateRequest) -> None:
        if request.HasField("n"):
            _require(1 <= request.n <= MAX_OUTPUTS, "n", f"is {request.n}; expected 1 to 64")
        _require(request.priority in messages.Priority.values(), "priority", "is unknown")
        _require(len(request.stop) <= MAX_STOPS, "stop", f"has more than {MAX_STOPS} entries")
        for stop in request.stop:
            size_fits = 0 < len(stop) <= MAX_STOP_CHARACTERS
            _require(size_fits, "stop", f"has an entry that is empty or > {MAX_STOP_CHARACTERS}")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for name, low, high in _RANGES:
            if not sampling.HasField(name) if name in _OPTIONAL else not getattr(sampling, name):
                continue
            value = getattr(sampling, name)
            if not low <= value <= high:  # NaN fails this too
                limit = "a number" if high == math.inf else f"at most {high:g}"
                raise InvalidArgument(
                    f"is {value:g}; expected at least {low:g} and {limit}",
                    field=f"sampling.{name}",
                )
        self._check_penalties(sampling)
        ids = sampling.stop_token_ids
        _require(len(ids) <= MAX_STOP_IDS, "sampling.stop_token_ids", "has more than 256 entries")
        self.check_ids("sampling.stop_token_ids", ids)
        self.check_ids("sampling.logit_bias", sorted(sampling.logit_bias))

    def _check_penalties(self, sampling: SamplingParams) -> None:
        if sampling.HasField("top_p"):
            _require(sampling.top_p > 0, "sampling.top_p", "is 0; expected more, at most 1")
        if sampling.HasField("repetition_penalty"):
            positive = 0 < sampling.repetition_penalty < math.inf
            _require(positive, "sampling.repetition_penalty", "must be more than 0 and finite")
        if sampling.HasField("temperature"):
            finite = math.isfinite(sampling.temperature)
            _require(finite, "sampling.temperature", "must be a finite number, 0 or more")
        bias = sampling.logit_bias
        _require(len(bias) <= MAX_LOGIT_BIASES, "sampling.logit_bias", "has more than 4096 entries")
        for token_id, value in bias.items():
            if not -100 <= value <= 100:
                raise InvalidArgument(
                    f"gives token {token_id} a bias of {value:g}; expected -100 to 100",
                    field="sampling.logit_bias",
                )

    def _effective(self, given: SamplingParams) -> SamplingParams:
        """With the end-of-sequence tokens among the stop tokens, unless they are to be ignored."""
        sampling = SamplingParams()
        sampling.CopyFrom(given)
        stop_ids = set(given.stop_token_ids)
        if not given.ignore_eos:
            stop_ids |= {i for i in self._tokenizer.special.eos_ids if i < self._info.vocab_size}
        del sampling.stop_token_ids[:]
        sampling.stop_token_ids.extend(sorted(stop_ids))
        return sampling


# Field, least, most. Those in _OPTIONAL have presence; 0 leaves the others out.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_OPTIONAL = frozenset(
    ("temperature", "top_p", "repetition_penalty", "logprobs", "prompt_logprobs", "seed")
)


def _require(condition: bool, field: str | None, problem: str) -> None:
    if not condition:
        raise InvalidArgument(problem, field=field or "")


def _json_object(text: str) -> dict[str, Any]:
    if not text:
        return {}
    field = "chat.template_arguments_json"
    if text.count("[") + text.count("{") > MAX_JSON_BRACKETS:
        raise InvalidArgument(f"has more than {MAX_JSON_BRACKETS} brackets", field=field)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"is not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidArgument("is not a JSON object", field=field)
    return value
