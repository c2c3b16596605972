"""The examples of the README and of the guide, run as printed by a user.

The wheel is in a virtual environment that holds what the wheel asks for and nothing else, outside the repository.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.wheel import install_wheel

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/your-own-query.md")
"""in this order, in one directory: what a page makes is there for the next"""
PARTS = re.compile(r"<!-- (run|file: (?P<file>\S+)) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that finds the wheel and what it needs, and nothing else."""
    return install_wheel(tmp_path_factory.mktemp("user"))


def test_the_examples_run_as_printed(environment: dict[str, str], tmp_path: Path) -> None:
    said = []
    for part in PARTS.finditer("\n".join((ROOT / page).read_text() for page in PAGES)):
        if part["file"]:
            (tmp_path / part["file"]).write_text(part["text"])
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", part["text"]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    text = "\n".join(said)
    assert "spenders: 3 checkpoints proven, 0 not" in text
    assert text.count("bob       2   1010") == 2, "restored, and read from the user's own query"
    totals = {tuple(line.split()[1:]) for line in text.splitlines() if re.match(r"\d+\s+(ada|bob|cyd)", line)}
    assert {("ada", "2", "1100"), ("bob", "2", "1010"), ("cyd", "1", "1500")} <= totals
    assert {("ada", "1100"), ("bob", "1010"), ("cyd", "1500")} <= totals
