"""`siltstone init`: what it writes, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from siltstone.errors import UsageError
from siltstone.templates import DAYS, make_project

ROOT = Path(__file__).parents[2]
SHARED = ("assets/*.py", "checks/*.py", "resources/*.py", "orchestration/*.py", "jobs/run_stream.py")
"""what this repository's own deployment has in common with every project"""


def test_a_project_is_laid_out_as_this_repositorys_own_deployment(tmp_path: Path) -> None:
    made = make_project(tmp_path / "shop")
    for pattern in SHARED:
        for own in ROOT.glob(pattern):
            name = str(own.relative_to(ROOT))
            assert name in made.files, name
            texts = (own.read_text(), Path(made.directory, name).read_text())
            assert len({re.sub(r"(?m)^OWNERS.*$", "OWNERS", text) for text in texts}) == 1, f"{name} differs"


def test_what_is_written_is_python_that_compiles_and_leaves_nothing_to_fill_in(tmp_path: Path) -> None:
    made = make_project(tmp_path / "My Shop!", "class")
    for name in made.files:
        text = Path(made.directory, name).read_text()
        assert "{{" not in text and "{%" not in text and "jinja" not in name, name
        if name.endswith(".py"):
            compile(text, name, "exec")
    assert 'name = "my-shop"' in Path(made.directory, "pyproject.toml").read_text()
    assert "streams/class_stream.py" in made.files, "a keyword cannot be imported"
    days = sorted(Path(made.directory, "data").iterdir(), key=lambda path: path.stat().st_mtime)
    assert len(days) == DAYS and days == sorted(days), "Spark reads them in the order of their times"


@pytest.mark.parametrize("name", ["2026", "true", "null", "1e3", "0x1f", "on"])
def test_a_project_may_be_called_like_a_number_or_a_word_of_yaml(tmp_path: Path, name: str) -> None:
    made = make_project(tmp_path / name)
    [location] = yaml.safe_load(Path(made.directory, "workspace.yaml").read_text())["load_from"]
    assert location["python_module"]["location_name"] == name


def test_an_empty_directory_is_filled_and_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    made = make_project(tmp_path / "here", "till")
    assert os.listdir(tmp_path) == ["here"]
    assert {str(p.relative_to(made.directory)) for p in Path(made.directory).rglob("*") if p.is_file()} == set(
        made.files
    )


@pytest.mark.parametrize("stream", ["../x", "a/b", "Shop", "", "x" * 65, "a.b", "-x"])
def test_a_name_that_no_stream_can_have_is_refused_and_nothing_is_written(stream: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a stream name"):
        make_project(tmp_path / "shop", stream)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_directory_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    command = [sys.executable, "-m", "siltstone.cli", "init"]
    for target in (tmp_path, tmp_path / "notes"):
        done = subprocess.run([*command, str(target)], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            f"siltstone: {target} is not an empty directory: name another one, or empty it"
        ]
    assert os.listdir(tmp_path) == ["notes"] and (tmp_path / "notes").read_text() == "mine"
