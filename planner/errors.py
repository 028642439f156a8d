"""How the planner says that an input is wrong."""

import difflib
from collections.abc import Iterable, Mapping


class InvalidInputError(ValueError):
    """An input that cannot be used.

    `field` names the input as its user wrote it (a flag, a JSON key, a proto field), `problem`
    says what is wrong with it and what would be right. `str()` is one line.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NotFoundError(InvalidInputError):
    """A name that the catalogue does not hold."""


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> str:
    """The candidates closest to `name`, as text for an error message; all if none is close."""
    known = sorted(candidates)
    close = difflib.get_close_matches(name.lower(), known, n=limit, cutoff=0.4)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(known)


def reject_unknown_keys(given: Mapping[str, object], known: Iterable[str], where: str) -> None:
    """Raise InvalidInputError for the first key of `given` that is not in `known`."""
    allowed = set(known)
    for key in given:
        if key not in allowed:
            raise InvalidInputError(f"{where}.{key}", f"unknown key; {nearest(key, allowed)}")
