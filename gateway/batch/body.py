"""A request body read field by field; errors name the field and what would be right."""

import difflib
import math
from collections.abc import Collection, Iterator
from typing import Any

MAX_UINT32 = 2**32 - 1


class RowError(Exception):
    """What is wrong with one row. `param` is the field's path; `code` a stable name."""

    def __init__(
        self, param: str, message: str, code: str = "invalid_request", custom_id: str | None = None
    ) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.code = code
        self.custom_id = custom_id


def _fault(name: str, expected: str) -> RowError:
    return RowError(f"body.{name}", f"must be {expected}")


class Body:
    """A JSON object whose fields are taken one by one; a field that is null counts as not given.

    Every reader raises RowError for a value of the wrong type.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._known: set[str] = set()

    def _take(self, name: str) -> Any:
        self._known.add(name)
        return self._content.get(name)

    def drop(self, name: str) -> None:
        """Accept a field that changes nothing here."""
        self._known.add(name)

    def check_finished(self, without_effect: Collection[str]) -> None:
        """Raise for a field that nobody took and that is not `without_effect`."""
        for name, value in self._content.items():
            if name in self._known or name in without_effect or value is None:
                continue
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RowError(f"body.{name}", f"is not supported{hint}")

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._take(name)
        if value is not None and not isinstance(value, str):
            raise _fault(name, "a string")
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise _fault(name, "a finite number")
        return float(value)

    def integer(self, name: str, least: int = 0, most: int = MAX_UINT32) -> int | None:
        """An integer in [least, most]."""
        value = self._take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _fault(name, f"an integer from {least} to {most}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _fault(name, "true or false")
        return value

    def strings(self, name: str) -> list[str]:
        """A string or a list of them."""
        value = self._take(name)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list) or not all(isinstance(entry, str) for entry in values):
            raise _fault(name, "a string or a list of strings")
        return values

    def integers(self, name: str) -> list[int]:
        """A list of token ids."""
        value = self._take(name) or []
        if not _is_ids(value):
            raise _fault(name, "a list of token ids")
        return list(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        value = self._take(name) or {}
        if not isinstance(value, dict):
            raise _fault(name, "a JSON object")
        return value

    def biases(self, name: str) -> Iterator[tuple[int, float]]:
        """Pairs of token id (a JSON key, so a string of digits) and number."""
        for key, value in self.mapping(name).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not key.isdecimal() or int(key) > MAX_UINT32 or not number or not _finite(value):
                raise _fault(name, "an object of numbers by token id")
            yield int(key), float(value)

    def messages(self, name: str) -> Iterator[tuple[str, str]]:
        """Pairs of role and text; a content of parts is their texts joined."""
        value = self._take(name)
        if not isinstance(value, list) or not value:
            raise _fault(name, "a list of at least one message")
        for index, message in enumerate(value):
            where = f"{name}[{index}]"
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise _fault(where, "an object with a role and a content")
            extra = set(message) - {"role", "content"}
            if extra:
                raise RowError(f"body.{where}.{min(extra)}", "is not supported")
            yield message["role"], _content(where, message.get("content"))

    def prompts(self, name: str) -> list[str | list[int]]:
        """A string, a list of token ids, or a list of either: one entry for each prompt."""
        value = self._take(name)
        if isinstance(value, str) or (value and _is_ids(value)):
            return [value]
        expected = "a string, a list of token ids, or a list of either, not empty"
        if not isinstance(value, list) or not value:
            raise _fault(name, expected)
        if not all(isinstance(entry, str) or _is_ids(entry) for entry in value):
            raise _fault(name, expected)
        return value


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fault(f"{where}.content", "a string or a list of text parts")
    texts = [part.get("text") if isinstance(part, dict) else None for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise _fault(f"{where}.content", "made of text parts; this server takes text only")
    return "".join(texts)  # type: ignore[arg-type]  # checked above


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= MAX_UINT32
        for entry in value
    )
