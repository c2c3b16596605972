"""A stream in a `dg` project: five lines of YAML, and no Python."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from siltstone.dagster import StreamComponent, stream_definitions
from siltstone.errors import UnknownStream, UsageError
from siltstone.stream import Stream
from tests.fault.small_stream import DAILY, SMALL, source

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


def keys(definitions: dg.Definitions) -> set[str]:
    return {spec.key.to_user_string() for spec in definitions.resolve_all_asset_specs()}


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


@pytest.fixture(autouse=True)
def _small_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_STREAMS", json.dumps(STREAMS))


def component(**attributes: str | float | Sequence[str]) -> dg.Definitions:
    return StreamComponent(**attributes).build_defs(dg.ComponentTree.for_test().load_context)  # pyright: ignore


def test_a_component_is_what_stream_definitions_gives() -> None:
    assert keys(component(stream="small")) == keys(stream_definitions(SMALL))
    owned = component(stream="small", owners=["team:data"]).resolve_all_asset_specs()
    assert {tuple(spec.owners) for spec in owned} == {("team:data",)}
    with pytest.raises(UnknownStream, match=r"no stream 'smal' is defined \(defined: .*small"):
        component(stream="smal")


def test_checkpoints_are_expected_within_a_time_if_asked() -> None:
    found = {spec.key.path[-1]: spec for spec in component(stream="small", fresh_within_s=90).resolve_all_asset_specs()}
    assert found["checkpoints"].freshness_policy == dg.FreshnessPolicy.time_window(timedelta(seconds=90))
    assert [name for name, spec in found.items() if spec.freshness_policy] == ["checkpoints"], "nothing else"
    with pytest.raises(UsageError, match="fresh_within_s is 10: use 60 seconds or more"):
        stream_definitions(SMALL, fresh_within_s=10)


def test_definitions_of_several_streams_merge() -> None:
    other = Stream("other", source=source, operators=[DAILY])
    both = dg.Definitions.merge(stream_definitions(SMALL, forks=["trial"]), stream_definitions(other))
    dg.Definitions.validate_loadable(both)
    assert {key.partition("/")[0] for key in keys(both)} == {"small", "trial", "other"}
    sensors = {each.name for each in both.sensors or []}
    assert {"small__alerts", "trial__alerts", "other__alerts"} <= sensors


def test_a_fork_that_would_write_to_its_parents_sink_is_refused() -> None:
    named = Stream("named", source=source, operators=SMALL.operators, sinks={"accounts": lambda rows, id: None})
    with pytest.raises(UsageError, match="trial is a fork of named and would write to its sink of accounts"):
        stream_definitions(named, forks=["trial"])
