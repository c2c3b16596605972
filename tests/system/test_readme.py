"""The examples of the README and of the guide, run as printed by a user.

The wheel is in a virtual environment that holds what the wheel asks for and nothing else, outside the repository.
"""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/your-own-query.md")
"""in this order, in one directory: what a page makes is there for the next"""
PARTS = re.compile(r"<!-- (run|file: (?P<file>\S+)) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that finds Siltstone in a virtual environment that holds the wheel and what it needs.

    What it needs is linked from this environment: pip would unpack half a gigabyte and compile it at the first import.
    """
    root = tmp_path_factory.mktemp("user")
    # A Spark session of this process has put its own packages on PYTHONPATH, where pip would find them.
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON")}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(root), str(ROOT)], check=True, env=inherited)
    (wheel,) = root.glob("siltstone-*.whl")
    home = root / "venv"
    venv.create(home)
    install = [*pip, "--python", str(home / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, env=inherited)
    [packages] = home.glob("lib/python*/site-packages")
    [installed] = Distribution.discover(name="siltstone", path=[str(packages)])
    for needed in _needed(installed.requires or ()):
        _link(needed, packages)
    return inherited | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def _needed(requirements: Iterable[str]) -> list[Distribution]:
    """What a user's pip would install for these: those required in turn, too, and no extra that nobody asked for."""
    found: dict[tuple[str, str], Distribution] = {}
    wanted = [(Requirement(text), "") for text in requirements]
    while wanted:
        requirement, of_extra = wanted.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in found:
                continue
            needed = found[requirement.name, extra] = distribution(requirement.name)
            assert requirement.specifier.contains(needed.version, prereleases=True), f"{requirement}: {needed.version}"
            wanted += [(Requirement(text), extra) for text in needed.requires or ()]
    return list(found.values())


def _link(needed: Distribution, packages: Path) -> None:
    """Make the files of a distribution those of another environment, too."""
    for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
        link = packages / name
        if not link.is_symlink():
            link.symlink_to(Path(str(needed.locate_file(name))))


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
