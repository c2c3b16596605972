"""A release is what is committed, built twice alike, under a version that the changelog tells of."""

import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.build_release import ROOT, Refused, build_twice, check_version

RANDOM = """
import os
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        with open(os.path.join(self.root, "siltstone", "built.txt"), "w") as file:
            file.write(os.urandom(8).hex())
"""


def git(repository: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=repository, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """This repository as far as a release needs it, ready for one."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and name.startswith(
            ("siltstone/", "streams/", "README", "LICENSE", "CHANGELOG", "pyproject")
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## [Unreleased]", "## [Unreleased]\n\n## [0.1.0] - 2026-01-01", 1))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "All of it")
    return tmp_path


@pytest.mark.slow
def test_a_release_holds_the_engine_and_its_licence_and_nothing_of_this_machine(repository: Path) -> None:
    built = build_twice(repository)
    (wheel, sdist) = (next(built[name] for name in built if name.endswith(end)) for end in (".whl", ".tar.gz"))
    assert len(built) == 2
    with zipfile.ZipFile(io.BytesIO(wheel)) as opened:
        names = opened.namelist()
        (metadata,) = (opened.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert "siltstone/catalog/database/migrations/versions/r0001_first_tables.py" in names
    assert {"siltstone/demo_streams/flights.py", "siltstone/templates/project/Makefile.jinja"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    with tarfile.open(fileobj=io.BytesIO(sdist)) as opened:
        assert {"LICENSE", "CHANGELOG.md", "pyproject.toml"} <= {Path(name).name for name in opened.getnames()}
        assert {member.uname for member in opened} == {""}


@pytest.mark.slow
def test_what_is_not_ready_is_refused(repository: Path) -> None:
    (repository / "siltstone" / "lying_around.py").write_text("")
    with pytest.raises(Refused, match=r"(?s)some changes are not committed.*lying_around"):
        build_twice(repository)
    git(repository, "tag", "v0.1.0")
    assert check_version(repository) == "0.1.0", "its own tag"
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "More")
    with pytest.raises(Refused, match=r"v0\.1\.0 is the tag of .*: raise the version"):
        build_twice(repository)
    (repository / "CHANGELOG.md").write_text("## [Unreleased]\n")
    with pytest.raises(Refused, match=r"CHANGELOG\.md has no section"):
        check_version(repository)


@pytest.mark.slow
def test_two_builds_that_differ_are_refused(repository: Path) -> None:
    (repository / "hatch_build.py").write_text(RANDOM)
    declared = repository / "pyproject.toml"
    declared.write_text(declared.read_text() + "\n[tool.hatch.build.targets.wheel.hooks.custom]\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "A file that is never the same")
    with pytest.raises((Refused, subprocess.CalledProcessError), match=r"two builds differ in siltstone-.*\.whl"):
        build_twice(repository)
