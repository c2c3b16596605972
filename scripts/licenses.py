"""The licences of everything that an install brings, as its packages state them: listed, and checked against a rule.

    python -m scripts.licenses            checks, and that docs/third-party-licenses.md is true
    python -m scripts.licenses --write    writes it

Reads only what is installed here. A pinned package that is not (of another system, or of the extra `screenshots`)
keeps the line it has in the list.
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
"""what is installed without an extra"""
DEVELOPMENT = frozenset({"dev", "docs", "screenshots"})
"""extras that only work on Siltstone itself needs"""
PERMISSIVE = re.compile(
    r"(MIT|MIT-0|MIT-CMU|0BSD|(3-Clause )?BSD( 3-Clause)?|BSD-[23]-Clause|Apache-2\.0|Apache Software|ISC|PSF-2\.0|"
    r"Python Software Foundation|Zlib|CC0|CC0-1\.0)( License)?( \([A-Z]+\))?"
)
WEAK_COPYLEFT = re.compile(r"(MPL-2\.0|Mozilla Public License 2\.0)( \(MPL 2\.0\))?")
"""binds changes to the package's own files, of which we make none"""
LIBRARY_COPYLEFT = re.compile(r"LGPL-3\.0-only|GNU Library or Lesser General Public License \(LGPL\)")
"""binds what is linked with it to let the library be replaced: `pip` does; never part of the engine"""
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
    """Check, and write if so asked; ends with 1 and a line for each thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the list")
    lines = listed(recorded())
    if parser.parse_args().write:
        LIST.write_text(HEAD + "".join(f"| {name} | {said} | {parts} |\n" for name, (said, parts) in lines.items()))
    for wrong in problems(lines):
        print(wrong, file=sys.stderr)
    sys.exit(1 if problems(lines) else 0)


def problems(lines: Mapping[str, tuple[str, str]]) -> list[str]:
    """What is wrong with a list: package -> (licence, parts that need it)."""
    found = [] if lines == recorded() else [f"{LIST.relative_to(ROOT)} is not true any more: make licenses"]
    for name, (said, parts) in lines.items():
        needed = frozenset(parts.split(", "))
        terms = re.split(r" AND |; | OR ", said)
        for term in terms:
            is_fine = PERMISSIVE.fullmatch(term) or WEAK_COPYLEFT.fullmatch(term)
            if not is_fine and not (LIBRARY_COPYLEFT.fullmatch(term) and ENGINE not in needed):
                found.append(f"{name}, needed by {parts}, is under {term}: not one of the licences that are taken")
    return found


def listed(before: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """The list as it should be, in the order of names."""
    needed, stated = needed_by(), licences()
    lines = {name: before.get(name, ("unknown", "unknown")) for name in sorted(pins())}
    for name in lines.keys() & stated.keys() & needed.keys():
        parts = sorted(needed[name], key=lambda part: (part in DEVELOPMENT, part))
        lines[name] = stated[name], ", ".join(parts)
    return lines


def recorded() -> dict[str, tuple[str, str]]:
    """The list as it is written down."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", LIST.read_text() if LIST.exists() else "", re.MULTILINE)
    return {name: (said, parts) for name, said, parts in rows if name != "package"}


def pins() -> list[str]:
    """The packages that an install may bring."""
    return [canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", PINS.read_text(), re.MULTILINE)]


def licences() -> dict[str, str]:
    """Installed package -> the licence it states."""
    command = [sys.executable, "-m", "piplicenses", "--format=json", "--from=mixed", "--with-system"]
    found = json.loads(subprocess.check_output(command, text=True))
    return {canonicalize_name(each["Name"]): each["License"] for each in found}


def needed_by() -> dict[str, set[str]]:
    """Package -> the parts of Siltstone that need it: the engine, or extras; what the engine needs, only that."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = {name: {ENGINE} for name in _closure(project["dependencies"])}
    for extra, wanted in project["optional-dependencies"].items():
        for name in _closure(wanted):
            if found.setdefault(name, set()) != {ENGINE}:
                found[name].add(extra)
    return found


def _closure(wanted: Iterable[str]) -> set[str]:
    """The packages that these requirements bring, themselves and by others, as far as they are installed."""
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
