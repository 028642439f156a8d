"""Reading the catalogue's JSON files, and looking names up in them."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner.errors import InvalidInputError, NotFoundError, nearest, reject_unknown_keys

Table = Mapping[str, Mapping[str, Any]]


@cache
def read_table(section: str) -> Table:
    """The entries of `section`.json by name. The file's schema is moe-lens/<section>/1."""
    file = f"{section}.json"
    data = json.loads((Path(__file__).parent / file).read_text())
    schema = f"moe-lens/{section}/1"
    if data.get("schema") != schema:
        raise InvalidInputError(f"{file}.schema", f"must be {schema!r}, is {data.get('schema')!r}")
    reject_unknown_keys(data, ("schema", section), file)
    entries: Table = data[section]
    return entries


def entry(section: str, name: str, what: str) -> Mapping[str, Any]:
    """One entry; NotFoundError calls it `what` and names the nearest."""
    table = read_table(section)
    if name not in table:
        raise NotFoundError(what, f"{name!r} is not in the catalogue; {nearest(name, table)}")
    return table[name]


def check_keys(
    data: Mapping[str, Any], required: Iterable[str], optional: Iterable[str], where: str
) -> None:
    """InvalidInputError for a key that is missing from `data` or that nothing reads."""
    needed = tuple(required)
    reject_unknown_keys(data, (*needed, *optional), where)
    for key in needed:
        if key not in data:
            raise InvalidInputError(f"{where}.{key}", "missing")
