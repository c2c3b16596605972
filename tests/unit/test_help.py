"""`siltstone --help` in a pipe: 100 columns wide, and one full line for each command."""

import re

import pytest

from tests.command_line import siltstone

COLUMNS = 100


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


def test_the_page_of_each_command_uses_the_whole_width_and_no_more(commands: dict[str, str]) -> None:
    pages = {command: siltstone(command, "--help").out for command in commands}
    longest = {command: max(map(len, page.splitlines())) for command, page in pages.items()}
    assert [command for command, columns in longest.items() if columns > COLUMNS] == []
    assert longest["run"] > 80
