"""One row of a batch file: OpenAI's request body as our requests.

Format: https://platform.openai.com/docs/guides/batch. Beyond the body's own fields, the widely used
extensions top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
chat_template_kwargs and include_stop_str_in_output are taken. A field that is neither known nor
without effect on the output is an error: nothing is ignored silently.
"""

import difflib
import json
from dataclasses import dataclass, field
from typing import Any

from moelens.v1 import gateway_pb2 as messages
from moelens.v1.common_pb2 import SamplingParams

from gateway.batch.body import Body, RowError

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MAX_CUSTOM_ID_CHARACTERS = 512
# What OpenAI's completions endpoint generates when max_tokens is not given.
DEFAULT_COMPLETION_TOKENS = 16
# They describe the caller or the transport, not the output.
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})


@dataclass(frozen=True)
class Row:
    """A valid row. One request for each prompt; `requests` have no id and no priority yet."""

    line: int
    custom_id: str
    url: str
    model: str
    requests: tuple[messages.GenerateRequest, ...] = field(repr=False)

    @property
    def chat(self) -> bool:
        """Whether the answer is a chat completion."""
        return self.url == CHAT_URL


def parse_row(line: int, text: str | bytes) -> Row:
    """Raises RowError; its `custom_id` is set as soon as the row has a usable one."""
    envelope = _json_object(text)
    custom_id = _custom_id(envelope)
    try:
        _check_names(envelope, {"custom_id", "method", "url", "body"})
        if envelope.get("method", "POST") != "POST":
            raise RowError("method", "must be POST")
        url = envelope.get("url")
        if url not in (CHAT_URL, COMPLETIONS_URL):
            raise RowError("url", f"must be {CHAT_URL} or {COMPLETIONS_URL}")
        content = envelope.get("body")
        if not isinstance(content, dict):
            raise RowError("body", "must be a JSON object")
        body = Body(content)
        requests = _chat(body) if url == CHAT_URL else _completions(body)
        body.check_finished(WITHOUT_EFFECT)
        return Row(line, custom_id, url, requests[0].model, tuple(requests))
    except UnicodeEncodeError as error:
        fault = RowError("body", "holds half of a surrogate pair, which is no character")
        fault.custom_id = custom_id
        raise fault from error
    except RowError as error:
        error.custom_id = custom_id
        raise


def _json_object(text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("", f"the line is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RowError("", "the line is not a JSON object", code="invalid_json")
    return value


def _custom_id(envelope: dict[str, Any]) -> str:
    value = envelope.get("custom_id")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID_CHARACTERS:
        limit = MAX_CUSTOM_ID_CHARACTERS
        raise RowError("custom_id", f"must be a string of 1 to {limit} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RowError("custom_id", "holds half of a surrogate pair, which is no character")
    return value


def _check_names(envelope: dict[str, Any], known: set[str]) -> None:
    for name in envelope:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RowError(name, f"is not a field of a row{hint}")


def _common(body: Body, request: messages.GenerateRequest) -> None:
    """What both endpoints share."""
    request.model = body.text("model") or ""
    _sampling(body, request.sampling)
    n = body.integer("n", least=1)
    if n is not None:
        request.n = n
    request.stop.extend(body.strings("stop"))
    request.include_stop = body.flag("include_stop_str_in_output")
    request.keep_special_tokens = not body.flag("skip_special_tokens", default=True)
    if body.flag("stream"):
        raise RowError("body.stream", "must be false in a batch")
    body.drop("stream_options")


def _sampling(body: Body, sampling: SamplingParams) -> None:
    for name in ("temperature", "top_p", "repetition_penalty"):
        value = body.number(name)
        if value is not None:
            setattr(sampling, name, value)
    for name in ("min_p", "frequency_penalty", "presence_penalty"):
        setattr(sampling, name, body.number(name) or 0.0)
    top_k = body.integer("top_k", least=-1)  # -1 is how other engines say "all"
    sampling.top_k = max(top_k or 0, 0)
    seed = body.integer("seed", least=-(2**63), most=2**64 - 1)
    if seed is not None:
        sampling.seed = seed % 2**64
    sampling.min_tokens = body.integer("min_tokens", least=0) or 0
    sampling.ignore_eos = body.flag("ignore_eos")
    sampling.stop_token_ids.extend(body.integers("stop_token_ids"))
    for token_id, bias in body.biases("logit_bias"):
        sampling.logit_bias[token_id] = bias


def _chat(body: Body) -> list[messages.GenerateRequest]:
    request = messages.GenerateRequest()
    _common(body, request)
    for role, content in body.messages("messages"):
        request.chat.messages.add(role=role, content=content)
    variables = body.mapping("chat_template_kwargs")
    if variables:
        request.chat.template_arguments_json = json.dumps(variables)
    newer, older = body.integer("max_completion_tokens"), body.integer("max_tokens")
    limit = newer if newer is not None else older
    if limit is not None:
        request.max_tokens = limit
    alternatives = body.integer("top_logprobs", least=0)
    if body.flag("logprobs"):
        request.sampling.logprobs = alternatives or 0
    elif alternatives is not None:
        raise RowError("body.top_logprobs", "needs logprobs to be true")
    return [request]


def _completions(body: Body) -> list[messages.GenerateRequest]:
    template = messages.GenerateRequest()
    _common(body, template)
    limit = body.integer("max_tokens")
    template.max_tokens = DEFAULT_COMPLETION_TOKENS if limit is None else limit
    alternatives = body.integer("logprobs", least=0)
    if alternatives is not None:
        template.sampling.logprobs = alternatives
    template.echo = body.flag("echo")
    if body.integer("best_of", least=1) not in (None, template.n or 1):
        raise RowError("body.best_of", "is not supported; leave it out or set it to n")
    if body.text("suffix"):
        raise RowError("body.suffix", "is not supported")
    requests = []
    for prompt in body.prompts("prompt"):
        request = messages.GenerateRequest()
        request.CopyFrom(template)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests
