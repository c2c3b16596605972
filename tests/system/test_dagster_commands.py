"""What Dagster's own commands say of this repository, and of a `dg` project with a stream: five lines of YAML."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
LOAD_RATIO = 4.0
PROJECT = """
[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "house"

[tool.dg.cli]
suppress_warnings = ["project_and_activated_venv_mismatch"]
"""
ROOT = """import dagster as dg
from pathlib import Path

@dg.definitions
def defs() -> dg.Definitions:
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
STREAMS = ["tests.fault.small_stream"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A `dg` project whose siltstone.toml names the tests' small stream."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "siltstone.toml").write_text(f"streams = {STREAMS}\n")
    (tmp_path / "house" / "defs").mkdir(parents=True)
    (tmp_path / "house" / "__init__.py").touch()
    (tmp_path / "house" / "defs" / "__init__.py").touch()
    (tmp_path / "house" / "definitions.py").write_text(ROOT)
    return tmp_path


def write(project: Path, name: str, attributes: Mapping[str, Any]) -> None:
    """A component of the project."""
    directory = project / "house" / "defs" / name
    directory.mkdir()
    given = {"type": "siltstone.dagster.StreamComponent", "attributes": dict(attributes)}
    (directory / "defs.yaml").write_text(yaml.safe_dump(given))


def dg_tool(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`dg` in the project, with nothing of this process's environment but where packages are."""
    programs = Path(sys.executable).parent
    given = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2])])}
    command = [str(programs / "dg"), *arguments]
    return subprocess.run(command, cwd=project, env=given, capture_output=True, text=True, check=False)


def test_dg_checks_a_project_with_streams_and_forks_in_yaml(project: Path) -> None:
    write(project, "small", {"stream": "small", "forks": ["small-trial"]})
    done = dg_tool(project, "check", "defs")
    assert done.returncode == 0 and "All definitions loaded successfully" in done.stdout + done.stderr, done
    listed = dg_tool(project, "list", "defs", "--json")
    assert listed.returncode == 0, listed.stderr
    for asset in ("small/checkpoints", "small/accounts_base_checkpoint", "small-trial/restored_state"):
        assert f'"{asset}"' in listed.stdout, listed.stdout


def test_dg_names_the_attribute_that_is_wrong(project: Path) -> None:
    write(project, "small", {"stream": "small", "fork": "small-trial"})
    done = dg_tool(project, "check", "yaml")
    assert done.returncode != 0 and "fork" in done.stdout + done.stderr


def test_loading_costs_little_beside_dagster_itself_and_starts_no_jvm() -> None:
    # Side by side, in processor time and the better of two: a machine may be slow, and its neighbours busy.
    ours = (
        "import json, sys, time\n"
        "from orchestration.definitions import definitions\n"
        "import dagster as dg\n"
        "dg.Definitions.validate_loadable(definitions())\n"
        "heavy = {'pyspark', 'py4j', 'matplotlib', 'great_expectations'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        "print(time.process_time())\n"
    )
    dagster = "import time, dagster\nprint(time.process_time())\n"
    taken: dict[str, list[float]] = {ours: [], dagster: []}
    for _ in range(2):
        for script, seconds in taken.items():
            done = subprocess.run(
                [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            seconds.append(float(done.stdout))
    assert min(taken[ours]) < LOAD_RATIO * min(taken[dagster])


VALIDATE = {"dagster": ["dagster", "definitions", "validate"], "dg": ["dg", "check", "defs"]}


@pytest.mark.smoke
@pytest.mark.parametrize("tool", VALIDATE)
def test_it_validates_in_an_empty_environment_without_a_warning(tool: str) -> None:
    programs = Path(sys.executable).parent
    command = [str(programs / VALIDATE[tool][0]), *VALIDATE[tool][1:]]
    empty = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "VIRTUAL_ENV": str(programs.parent)}
    done = subprocess.run(command, cwd=REPOSITORY, env=empty, capture_output=True, text=True, check=False)
    said = done.stderr + done.stdout
    assert done.returncode == 0, said
    assert "Validation successful for code location siltstone" in said or "All definitions loaded successfully" in said
    said = re.sub(r".*SupersessionWarning: Function `definitions_validate_command`.*", "", said)  # Dagster, of itself
    assert not re.search(r"Warning:|WARNING", said), said
