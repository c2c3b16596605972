"""List the licences of all packages that an install brings, as the packages state them, and check them against a rule.

    python -m scripts.licenses            checks them, and that docs/third-party-licenses.md is up to date
    python -m scripts.licenses --write    writes that file

It reads only installed packages. A pinned package that is not installed (of another system, or of the extra
`screenshots`) keeps its line in the list.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LIST, PINS = ROOT / "docs" / "third-party-licenses.md", ROOT / "constraints.txt"
ENGINE = "engine"
"""packages that are installed without an extra"""
DEVELOPMENT = frozenset({"dev", "docs", "screenshots"})
"""extras that only developers of Siltstone need"""
PERMISSIVE = re.compile(
    r"(MIT|MIT-0|MIT-CMU|0BSD|(3-Clause )?BSD( 3-Clause)?|BSD-[23]-Clause|Apache-2\.0|Apache Software|ISC|PSF-2\.0|"
    r"Python Software Foundation|Zlib|CC0|CC0-1\.0)( License)?( \([A-Z]+\))?"
)
WEAK_COPYLEFT = re.compile(r"(MPL-2\.0|Mozilla Public License 2\.0)( \(MPL 2\.0\))?")
"""applies only to changes of the package's own files, which we do not make"""
LIBRARY_COPYLEFT = re.compile(r"LGPL-3\.0-only|GNU Library or Lesser General Public License \(LGPL\)")
"""requires that users can replace the library, which `pip` allows; never part of the engine"""
DEBIANS = "DFSG approved"
"""what a package may say besides naming its licence"""
HEAD = """\
# Licences of others

Siltstone itself is under the Apache License 2.0 ([LICENSE](../LICENSE)). Its wheel holds nobody else's code; an install
brings the packages below, each under a licence of its own, as the package states it. `needed by` names the parts of
Siltstone that bring it: `engine` is what `pip install siltstone` does, the rest are extras.

psycopg and psycopg2 (extras `postgres` and `dagster`) are under the LGPL. They are separate packages, installed beside
Siltstone unchanged, and can be replaced by others, which is what the LGPL asks for; the engine alone needs neither.

`make licenses` writes this list, and `make test` checks that it is true and that nothing stricter came in.

| package | licence | needed by |
|---|---|---|
"""


def main() -> None:
    """Check, and write with `--write`; exit with code 1 and one line per problem if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the list")
    lines = make_list(read_list())
    if parser.parse_args().write:
        LIST.write_text(HEAD + "".join(f"| {name} | {said} | {parts} |\n" for name, (said, parts) in lines.items()))
    for problem in problems(lines):
        print(problem, file=sys.stderr)
    sys.exit(1 if problems(lines) else 0)


def problems(lines: Mapping[str, tuple[str, str]]) -> list[str]:
    """List the problems of a list: package -> (licence, parts that need it)."""
    found = [] if lines == read_list() else [f"{LIST.relative_to(ROOT)} is out of date: run make licenses"]
    for name, (said, parts) in lines.items():
        needed = frozenset(parts.split(", "))
        terms = re.split(r" AND |; | OR ", said)
        terms = [term for term in terms if term != DEBIANS] or terms
        for term in terms:
            is_fine = PERMISSIVE.fullmatch(term) or WEAK_COPYLEFT.fullmatch(term)
            if not is_fine and not (LIBRARY_COPYLEFT.fullmatch(term) and ENGINE not in needed):
                found.append(f"{name}, needed by {parts}, is under {term}: this licence is not accepted")
    return found


def make_list(before: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Make the list of installed packages, by name; those not installed keep their line of `before`."""
    needed, stated = needed_by(), licences()
    lines = {name: before.get(name, ("unknown", "unknown")) for name in sorted(pins())}
    for name in lines.keys() & stated.keys() & needed.keys():
        parts = sorted(needed[name], key=lambda part: (part in DEVELOPMENT, part))
        lines[name] = stated[name], ", ".join(parts)
    return lines


def read_list() -> dict[str, tuple[str, str]]:
    """Read the list from its file."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", LIST.read_text() if LIST.exists() else "", re.MULTILINE)
    return {name: (said, parts) for name, said, parts in rows if name != "package"}


def pins() -> list[str]:
    """Read the names of the packages that an install may bring."""
    return [canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", PINS.read_text(), re.MULTILINE)]


def licences() -> dict[str, str]:
    """Read installed package -> the licence it states."""
    command = [sys.executable, "-m", "piplicenses", "--format=json", "--from=mixed", "--with-system"]
    found = json.loads(subprocess.check_output(command, text=True))
    return {canonicalize_name(each["Name"]): each["License"] for each in found}


def needed_by() -> dict[str, set[str]]:
    """Find package -> the parts of Siltstone that need it: only the engine if that needs it, else the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = {name: {ENGINE} for name in _closure(project["dependencies"])}
    for extra, wanted in project["optional-dependencies"].items():
        for name in _closure(wanted):
            if found.setdefault(name, set()) != {ENGINE}:
                found[name].add(extra)
    return found


def _closure(wanted: Iterable[str]) -> set[str]:
    """List the packages that requirements bring, directly and indirectly, as far as they are installed."""
    seen: set[tuple[str, str]] = set()
    ahead = [(Requirement(each), "") for each in wanted]
    while ahead:
        requirement, extra = ahead.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for each in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, each))
            with suppress(metadata.PackageNotFoundError):
                ahead += [(Requirement(text), each) for text in metadata.requires(name) or []]
    return {name for name, _ in seen}


if __name__ == "__main__":
    main()
