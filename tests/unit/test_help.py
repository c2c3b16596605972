"""Help: 100 columns wide in a pipe, one full line for each command, and one text with the client's method."""

import inspect
import re
from typing import Any

import pytest
from typer.main import get_command

from siltstone.cli.application import app
from siltstone.client import Client, StreamClient
from tests.command_line import siltstone

COLUMNS = 100
OWN = {"init", "demo", "ui"}
"""commands that no method of the client does"""
METHODS = {"backup": "back_up", "optimize": "optimize_sinks"}
"""command -> method, where their names differ"""
PYTHON = re.compile(r"\b(?:None|True|False|self|str|called with|Args|Returns|Raises|DataFrame|Sequence|Mapping)\b")
"""what only a reader of Python knows"""
TYPES = re.compile(r"<[^>]+>")
"""typer's own, such as <list[str]>"""


@pytest.fixture(scope="module")
def commands() -> dict[str, str]:
    """Command -> its line in the list."""
    listed = siltstone("--help").out.partition("Run and look:")[2].splitlines()
    lines = [line for line in listed if line.startswith(" ")]
    found = {line.split()[0]: line for line in lines if re.match(r"  \S", line)}
    assert list(found.values()) == lines, "a line goes on in the next one"
    return found


def test_each_command_is_one_full_sentence_on_one_line(commands: dict[str, str]) -> None:
    assert {"run", "restore-series", "init", "demo", "ui"} <= commands.keys()
    assert [line for line in commands.values() if not line.endswith(".") or len(line) > COLUMNS] == []


@pytest.fixture(scope="module")
def pages(commands: dict[str, str]) -> dict[str, str]:
    """Command -> what its `--help` prints."""
    return {command: siltstone(command, "--help").out for command in commands}


def test_the_page_of_each_command_uses_the_whole_width_and_no_more(pages: dict[str, str]) -> None:
    longest = {command: max(map(len, page.splitlines())) for command, page in pages.items()}
    assert [command for command, columns in longest.items() if columns > COLUMNS] == []
    assert longest["run"] > 80


def words(text: str) -> str:
    """The text without its line ends and indents."""
    return " ".join(text.split())


def test_each_command_says_what_its_method_says(commands: dict[str, str], pages: dict[str, str]) -> None:
    for command in commands.keys() - OWN:
        name = METHODS.get(command, command.replace("-", "_"))
        method = getattr(StreamClient, name, None) or getattr(Client, name)
        described = re.split(r"^(?:Args|Raises|Returns):$", inspect.getdoc(method) or "", flags=re.MULTILINE)[0]
        assert words(described).replace("`to`", "--to") in words(pages[command]), command


def test_each_argument_and_option_is_described() -> None:
    found: Any = get_command(app)
    params = [(name, each) for name, command in found.commands.items() for each in command.params]
    assert len(params) > 100
    assert [(name, each.name) for name, each in params if not (each.help or "").endswith((".", "]"))] == []


def test_no_page_needs_python_to_be_read(pages: dict[str, str]) -> None:
    assert {command: found for command, page in pages.items() if (found := PYTHON.findall(TYPES.sub("", page)))} == {}


def test_options_have_the_text_of_the_argument_or_of_the_setting(pages: dict[str, str]) -> None:
    shown = {command: words(page) for command, page in pages.items()}
    assert "--as-of EVENT_TIME An event time (ISO 8601), instead of --at: the newest" in shown["restore"]
    assert "--operator <list[str]> Materialize only these operators. Repeatable. [all]" in shown["materialize"]
    assert "FILE <path> A file that does not exist yet. [one next to a SQLite catalog]" in shown["backup"]
    assert "--checkpoint-s <float> Seconds between checkpoints, instead of --checkpoint-steps." in shown["run"]
    assert "--backend <str> Backend of the working state: heap or rocksdb. [heap]" in shown["run"]
    assert "Exit code 1 if the new checkpoint is not proven." in shown["edit"], "what the command adds"
