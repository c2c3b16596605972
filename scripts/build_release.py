"""Build the wheel and the source distribution of the current commit twice, and check that both builds are identical.

    python -m scripts.build_release [--output DIRECTORY]        or: make release

It builds only committed files, from two copies in two directories: the wheel from the source distribution, with the
pinned build backend. It refuses a version that has no section in CHANGELOG.md, or whose tag is on another commit. It
uploads nothing: CONTRIBUTING.md has the steps of a release.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Refused(Exception):
    """The commit cannot be released; the message says what to do."""


def main() -> None:
    """Build and write the files; on failure, exit with code 1 and the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIRECTORY", help="[default: dist]")
    output = parser.parse_args().output
    try:
        built = build_twice(ROOT)
    except (Refused, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}\n{getattr(error, 'stderr', '') or ''}".strip())
    output.mkdir(parents=True, exist_ok=True)
    for name, content in built.items():
        (output / name).write_bytes(content)
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in built.items())
    (output / "SHA256SUMS").write_text(sums)
    print(f"{sums}Both builds are identical; files are in {output}.", end="\n")


def build_twice(repository: Path) -> dict[str, bytes]:
    """Build the two files of a release; return name -> content.

    Raises:
        Refused: a change is not committed, the version cannot be released by this commit, or the builds differ.
        subprocess.CalledProcessError: git or the build fails.
    """
    if changed := _git(repository, "status", "--porcelain").strip():
        raise Refused(f"some changes are not committed: commit or stash\n{changed}")
    check_version(repository)
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=repository, check=True, capture_output=True
    ).stdout
    time = _git(repository, "log", "-1", "--format=%ct").strip()
    first, second = _build(archive, time), _build(archive, time)
    if differing := [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]:
        raise Refused(f"two builds differ in {', '.join(sorted(differing))}: find out why before releasing")
    return first


def check_version(repository: Path) -> str:
    """Return the version, if this commit may be its release.

    Raises:
        Refused: CHANGELOG.md has no section of the version, or its tag is on another commit.
    """
    version = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["version"]
    changes = (repository / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        raise Refused(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`: move the unreleased changes there")
    tag = f"v{version}"
    if tag in _git(repository, "tag", "--list", tag).split():
        tagged, here = (_git(repository, "rev-parse", f"{name}^{{commit}}").strip() for name in (tag, "HEAD"))
        if tagged != here:
            raise Refused(f"{tag} is the tag of {tagged[:10]}, not of {here[:10]}: raise the version in pyproject.toml")
    return version


def _build(archive: bytes, time: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="siltstone-release-") as directory:
        source, output = Path(directory) / "source", Path(directory) / "dist"
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(source, filter="data")
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)],
            check=True,
            capture_output=True,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | {"SOURCE_DATE_EPOCH": time},
        )
        return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
