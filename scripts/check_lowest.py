"""Check that the installed versions are the lowest that pyproject.toml allows, as in `make test-lowest`.

The resolver takes a later version where another package needs one. No test would then have tried the declared bound.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def find_untried() -> Iterator[str]:
    """Yield a line for each installed package whose version is not the lowest one declared."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in map(Requirement, [*project["dependencies"], *(each for extra in extras for each in extra)]):
        for bound in requirement.specifier:
            try:
                installed = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:  # of an extra that is not installed
                continue
            lowest = Version(bound.version).release if bound.operator == ">=" else ()
            if Version(installed).release[: len(lowest)] != lowest:
                yield f"{requirement} is declared, but {installed} was tried: raise the bound in pyproject.toml"


if __name__ == "__main__":
    untried = sorted(set(find_untried()))
    sys.exit("\n".join(untried) if untried else 0)
