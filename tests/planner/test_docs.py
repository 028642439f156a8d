"""docs/planner.md names every field of the estimate's JSON, and its commands run."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.estimate import Detail, estimate
from planner.inputs import CaseInputs

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "planner.md").read_text()
SCHEMA_SECTION = TEXT.split("## The JSON of an estimate")[1].split("## Service")[0]


def fields() -> list[tuple[str, str]]:
    """(section, field) of every key two levels deep."""
    inputs = CaseInputs("mixtral-8x7b", "a40-xeon8380", "98", "32", "500", kv="70GB")
    data = estimate(inputs.case(), Detail.SCALED).to_json()
    return [
        (section, field)
        for section, value in data.items()
        for field in (value if isinstance(value, dict) else [""])
    ]


@pytest.mark.parametrize(("section", "field"), fields())
def test_every_field_is_documented(section, field):
    rows = [row for row in SCHEMA_SECTION.splitlines() if row.startswith("|")]
    in_section = [row for row in rows if re.match(rf"\| `{section}[.`]", row)]
    wanted = re.compile(rf"[.`]{field}`") if field else re.compile(rf"`{section}`")
    assert any(wanted.search(row) for row in in_section), f"{section}.{field}"


@pytest.mark.parametrize("name", re.findall(r"!\[.*\]\((.*)\)", TEXT))
def test_pictures_are_there(name):
    assert (DOCS / name).stat().st_size > 10_000


def commands() -> list[str]:
    """Command lines of the page; the full simulation is left to whoever draws the picture."""
    joined = TEXT.replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?moe-lens plan (\w+ --.*)$", joined, re.MULTILINE)
    return [line.replace(" --full", "") for line in lines if not line.startswith("serve")]


@pytest.mark.parametrize("line", commands())
def test_commands_run(line, tmp_path):
    arguments = shlex.split(line)
    if "--plot" in arguments:
        place = arguments.index("--plot") + 1
        arguments[place] = str(tmp_path / Path(arguments[place]).name)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
