"""The user's modules are found by path or where they are installed, never because of where a command is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from siltstone.errors import UsageError
from siltstone.stream import load_module


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_and_a_package_by_path_are_searched_last(here: Path) -> None:
    (here / "of_a_file.py").write_text("value = 1\n")
    (here / "of_a_package").mkdir()
    (here / "of_a_package" / "__init__.py").write_text("value = 2\n")
    (here / "of_a_package" / "inner.py").write_text("from of_a_package import value\n")
    assert load_module("./of_a_file.py").value == 1
    assert load_module("./of_a_package").value == 2
    inner = load_module("of_a_package/inner.py")
    assert (inner.__name__, inner.value) == ("of_a_package.inner", 2)
    assert sys.path[-1] == str(here) and sys.path.count(str(here)) == 1


def test_what_only_lies_here_is_not_loaded_by_name(here: Path) -> None:
    (here / "lies_here.py").write_text("raise AssertionError\n")
    with pytest.raises(UsageError, match=r"no module lies_here is installed: .* name its path, \./lies_here\.py"):
        load_module("lies_here")
    with pytest.raises(ModuleNotFoundError):
        load_module("is_nowhere")


def test_an_installed_module_is_not_replaced_by_one_of_its_name(here: Path) -> None:
    (here / "json.py").write_text("raise AssertionError\n")
    with pytest.raises(UsageError, match="is hidden by another module of its name"):
        load_module("./json.py")


@pytest.mark.parametrize("name", ["./gone.py", "./gone", "./two words.py", "/", ".py"])
def test_what_is_no_module_is_told(here: Path, name: str) -> None:
    (here / "two words.py").touch()
    with pytest.raises(UsageError, match=r"is not a module|cannot be a module.s name"):
        load_module(name)


@pytest.mark.slow
def test_a_command_runs_no_file_of_the_directory_it_is_started_in(here: Path) -> None:
    for name in ("json", "typer", "sqlalchemy", "pyarrow", "streams"):
        (here / f"{name}.py").write_text(f"open({name!r} + '.ran', 'w')\n")
    (here / "siltstone.toml").write_text('streams = ["streams_that_are_nowhere"]\n')
    command = "import sys; from siltstone.cli import main; sys.argv = ['siltstone', 'checkpoints', 'x']; main()"
    ended = subprocess.run([sys.executable, "-P", "-c", command], cwd=here, env=os.environ, check=False)
    assert ended.returncode == 2 and not list(here.glob("*.ran"))
