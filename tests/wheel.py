"""The wheel as a user installs it: in a virtual environment of its own, outside the repository."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
HANGING_S = 900
"""when a command counts as hanging"""


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this repository into a directory."""
    wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(directory), str(ROOT)]
    subprocess.run(wheel, check=True, env=_inherited())
    (built,) = directory.glob("siltstone-*.whl")
    return built


def make_environment(wheel: Path, home: Path, extras: Iterable[str] = (), further: Iterable[str] = ()) -> Path:
    """Make a virtual environment that holds a wheel, what it needs with these extras, further distributions, and pip.

    What it needs is linked from this environment: pip would unpack half a gigabyte and compile it at the first import.
    """
    venv.create(home)
    install = [*PIP, "--python", str(home / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, env=_inherited())
    [packages] = home.glob("lib/python*/site-packages")
    [installed] = Distribution.discover(name="siltstone", path=[str(packages)])
    for needed in _needed(["pip", *(installed.requires or ()), *further], extras):
        _link(needed, packages)
    pip = home / "bin" / "pip"
    pip.write_text(f"#!{home / 'bin' / 'python'}\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n")
    pip.chmod(0o755)
    return home


def activated(home: Path) -> dict[str, str]:
    """The variables of a shell in which a virtual environment is activated, and pip asks no index."""
    inherited = {name: value for name, value in _inherited().items() if not name.startswith("SILTSTONE_")}
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PATH": path, "VIRTUAL_ENV": str(home), "PIP_NO_INDEX": "1"}


def run_in(directory: Path, environment: Mapping[str, str], *command: str) -> str:
    """What a command says, on both outputs, that has to succeed."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=HANGING_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _inherited() -> dict[str, str]:
    """The variables of this process, without those that would lead out of another environment."""
    # A Spark session of this process has put its own packages on PYTHONPATH, where pip would find them.
    leading = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in leading}


def _needed(requirements: Iterable[str], extras: Iterable[str]) -> list[Distribution]:
    """What a user's pip would install for these: those required in turn, too, and no extra that nobody asked for."""
    found: dict[tuple[str, str], Distribution] = {}
    wanted = [(Requirement(text), extra) for text in requirements for extra in ("", *extras)]
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
