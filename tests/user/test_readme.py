"""The README's first stream, by the installed program and with nothing that the wheel does not ask for."""

import re
from pathlib import Path

import pytest

from tests.pages import blocks
from tests.user.conftest import Environments
from tests.wheel import run_in


@pytest.mark.smoke
def test_the_first_stream_runs_as_printed(environments: Environments, tmp_path: Path) -> None:
    environment, text = environments(), ""
    for block in blocks("README.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif not block.unrun:
            text += run_in(tmp_path, environment, "bash", "-euo", "pipefail", "-c", block.text)
    assert "spenders: 3 checkpoints proven, 0 not" in text
    assert text.count("bob       2   1010") == 1, "restored"
    totals = {tuple(line.split()[1:]) for line in text.splitlines() if re.match(r"\d+\s+(ada|bob|cyd)", line)}
    assert {("ada", "2", "1100"), ("bob", "2", "1010"), ("cyd", "1", "1500")} <= totals
    assert {("ada", "1100"), ("bob", "1010"), ("cyd", "1500")} <= totals
