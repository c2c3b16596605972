"""The wheel as a user installs it: in a virtual environment of its own, outside the repository."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def install_wheel(root: Path, extras: Iterable[str] = ()) -> dict[str, str]:
    """Build the wheel, and make a virtual environment below `root` that holds it and what it needs.

    What it needs is linked from this environment: pip would unpack half a gigabyte and compile it at the first import.
    """
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
    for needed in _needed(installed.requires or (), extras):
        _link(needed, packages)
    return inherited | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}


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
