"""No file of Python is longer than 600 lines and no function longer than 60, in tests as in the engine."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("siltstone", "streams", "jobs", "assets", "resources", "checks", "orchestration")
FOLDERS += ("benchmarks", "scripts", "tests")
LANDED = ROOT / "siltstone" / "catalog" / "database" / "migrations" / "versions"
"""revisions, which are never edited once they have landed (tests/unit/test_revisions.py)"""
FILE_LINES = 600
FUNCTION_LINES = 60


def too_long(name: str, text: str) -> Iterator[str]:
    """The file, if it is over its limit, and each function in it that is over its own, decorators not counted."""
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        yield f"{name} has {lines} lines: at most {FILE_LINES}, split it by subject"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{name}:{node.lineno} {node.name} has {lines} lines: at most {FUNCTION_LINES}, split it"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_and_no_function_is_too_long(folder: str) -> None:
    paths = sorted(path for path in (ROOT / folder).rglob("*.py") if path.parent != LANDED)
    assert paths
    found = [line for path in paths for line in too_long(str(path.relative_to(ROOT)), path.read_text())]
    assert found == []


def test_both_limits_are_seen() -> None:
    line = "    pass\n"
    function = "def f():\n" + line * (FUNCTION_LINES - 1)
    assert list(too_long("a.py", function + "pass\n" * (FILE_LINES - FUNCTION_LINES))) == []
    assert list(too_long("a.py", function + line)) == ["a.py:1 f has 61 lines: at most 60, split it"]
    assert list(too_long("a.py", "pass\n" * 601)) == ["a.py has 601 lines: at most 600, split it by subject"]
