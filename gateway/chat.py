"""Chat messages to a prompt, with the checkpoint's own template.

A template is part of a downloaded checkpoint, so it runs in jinja2's immutable sandbox: no access
to Python's internals, no files, no imports, and a bound on what it may produce.
"""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARACTERS = 16 * 2**20
MAX_FACTOR, MAX_EXPONENT = 2**32, 32


class ChatError(ValueError):
    """The messages do not suit the template, or the template is broken; says what."""


@dataclass(frozen=True)
class Message:
    """One turn: who says it ("system", "user", "assistant", …) and what."""

    role: str
    content: str


class ChatTemplate:
    """A checkpoint's chat template, compiled once. ChatError when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the checkpoint's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included. ChatError when the template refuses."""
        if not messages:
            raise ChatError("there are no messages; expected at least one")
        variables = {
            **self._special_tokens,
            **(arguments or {}),
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "add_generation_prompt": generation_prompt,
        }
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise ChatError(f"the prompt exceeds {MAX_RENDERED_CHARACTERS} characters")
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise ChatError(f"the checkpoint's chat template refuses this: {error}") from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, and no operator that makes something huge out of something small."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Called for the operators above instead of applying them."""
        if operator == "**" and not (abs(left) <= MAX_FACTOR and abs(right) <= MAX_EXPONENT):
            raise ChatError("the checkpoint's chat template raises to a large power")
        if operator == "*":
            sizes = [len(x) if isinstance(x, Sized) else abs(x) for x in (left, right)]
            if any(isinstance(x, Sized) for x in (left, right)) and (
                sizes[0] * sizes[1] > MAX_RENDERED_CHARACTERS
            ):
                raise ChatError(f"the prompt exceeds {MAX_RENDERED_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Sandbox:
    """What templates of checkpoints rely on: trimmed blocks, tojson, and these functions."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as it is: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
