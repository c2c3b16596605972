"""A stream in a `dg` project: five lines of YAML, and no Python."""

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.testing.utils import create_defs_folder_sandbox

from siltstone.dagster import StreamComponent, stream_definitions
from siltstone.errors import UnknownStream, UsageError
from siltstone.stream import Stream
from tests.fault.small_stream import DAILY, SMALL, source

STREAMS = ["tests.fault.small_stream"]


def keys(definitions: dg.Definitions) -> set[str]:
    return {spec.key.to_user_string() for spec in definitions.resolve_all_asset_specs()}


@pytest.fixture(autouse=True)
def _small_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_STREAMS", json.dumps(STREAMS))


def component(**attributes: Any) -> dg.Definitions:
    """The definitions of a `dg` project with one component."""
    return project(attributes)


def project(*components: Mapping[str, Any]) -> dg.Definitions:
    """The definitions of a `dg` project with some components, each with these attributes."""
    with create_defs_folder_sandbox() as sandbox:
        for n, attributes in enumerate(components):
            yaml = {"type": "siltstone.dagster.StreamComponent", "attributes": attributes}
            sandbox.scaffold_component(component_cls=StreamComponent, defs_path=f"c{n}", defs_yaml_contents=yaml)
        with sandbox.build_all_defs() as definitions:
            dg.Definitions.validate_loadable(definitions)
            return definitions


def test_a_component_is_what_stream_definitions_gives() -> None:
    assert keys(component(stream="small")) == keys(stream_definitions(SMALL))
    owned = component(stream="small", owners=["team:data"]).resolve_all_asset_specs()
    assert {tuple(spec.owners) for spec in owned} == {("team:data",)}
    with pytest.raises(ComponentTreeException) as failed:
        component(stream="smal")
    assert isinstance(failed.value.__cause__, UnknownStream)
    assert "no stream 'smal' is defined (defined: small" in str(failed.value.__cause__)


def test_checkpoints_are_expected_within_a_time_if_asked() -> None:
    found = {spec.key.path[-1]: spec for spec in component(stream="small", fresh_within_s=90).resolve_all_asset_specs()}
    assert found["checkpoints"].freshness_policy == dg.FreshnessPolicy.time_window(timedelta(seconds=90))
    assert [name for name, spec in found.items() if spec.freshness_policy] == ["checkpoints"], "nothing else"
    with pytest.raises(UsageError, match="fresh_within_s is 10: use 60 seconds or more"):
        stream_definitions(SMALL, fresh_within_s=10)


def test_components_share_what_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster copies the definitions of each."""
    monkeypatch.setenv("SILTSTONE_STREAMS", json.dumps([*STREAMS, "tests.system.live_stream"]))
    repository = project({"stream": "small", "forks": ["trial"]}, {"stream": "live"}).get_repository_def()
    assert {"small", "trial", "live", "siltstone__sweep"} <= set(repository.job_names)
    assert sorted(each.name for each in repository.sensor_defs if not each.name.startswith("default")) == [
        f"siltstone__{name}" for name in ("alerts", "new_checkpoints", "recover_failed", "sweep_recovered")
    ]
    assert len(repository.schedule_defs) == 7


def test_a_component_translates_keys_and_attributes() -> None:
    given = {"key": "lake/{{ stream }}/{{ spec.key.path[-1] }}", "group_name": "lake", "tags": {"part": "{{ part }}"}}
    found = {s.key.to_user_string(): s for s in component(stream="small", translation=given).resolve_all_asset_specs()}
    checkpoints = found["lake/small/checkpoints"]
    assert checkpoints.group_name == "lake"
    assert checkpoints.tags.items() >= {"part": "checkpoints", "siltstone/part": "checkpoints"}.items()
    assert all(key.startswith("lake/small/") for key in found)


def test_a_component_gives_its_steps_tags_and_pools_and_leaves_assets_out() -> None:
    given = {"op": {"tags": {"team": "data"}, "pool": "streams", "backfill_policy": {"type": "multi_run"}}}
    found = component(stream="small", select="not tag:siltstone/part=full_snapshot", **given)
    assert not any(key.endswith("full_snapshot") for key in keys(found)) and "small/restored_state" in keys(found)
    graph = found.resolve_asset_graph()
    assert {key.name for key in graph.asset_check_keys} >= {"digest", "no_gap"}
    assert "restore_equals_snapshot" not in {key.name for key in graph.asset_check_keys}
    steps = {each.node_def.name: each for each in found.assets or () if isinstance(each, dg.AssetsDefinition)}
    ops = [each.node_def for each in steps.values() if isinstance(each.node_def, dg.OpDefinition)]
    assert {op.pool for op in ops} == {"streams"}
    assert all(op.tags.items() >= {"team": "data", "siltstone/stream": "small"}.items() for op in ops)
    assert steps["small__restored_state"].backfill_policy == dg.BackfillPolicy.multi_run()
    for attributes, says in (
        ({"select": "key:nothing"}, "select is 'key:nothing', which is none of the stream's assets"),
        ({"select": "(("}, r"select is '\(\(', which is not a selection of a stream's assets"),
        ({"launch": "nobody.nothing"}, "launch is 'nobody.nothing': use subprocess, or MODULE.FUNCTION of yours"),
        ({"launch": "nothing"}, "launch is 'nothing': use subprocess"),
        ({"op": {"name": "mine"}}, "op has a name or (a )?description"),
    ):
        with pytest.raises(ComponentTreeException) as failed:
            component(stream="small", **attributes)
        assert re.search(says, str(failed.value.__cause__)), failed.value.__cause__


def test_a_component_runs_its_stream_in_a_process_of_its_own() -> None:
    assert keys(component(stream="small", launch="subprocess")) == keys(stream_definitions(SMALL))


def test_definitions_of_several_streams_merge() -> None:
    other = Stream("other", source=source, operators=[DAILY])
    both = dg.Definitions.merge(stream_definitions(SMALL, forks=["trial"]), stream_definitions(other))
    dg.Definitions.validate_loadable(both)
    assert {key.partition("/")[0] for key in keys(both)} == {"small", "trial", "other"}
    repository = both.get_repository_def()
    sensors = {each.name for each in repository.sensor_defs}
    assert sensors >= {f"siltstone__{name}" for name in ("recover_failed", "new_checkpoints", "alerts")}
    assert len(repository.sensor_defs) <= 5, "one of each kind"
    assert set(repository.job_names) >= {"small", "trial", "other", "siltstone__recover"}


def test_a_fork_that_would_write_to_its_parents_sink_is_refused() -> None:
    named = Stream("named", source=source, operators=SMALL.operators, sinks={"accounts": lambda rows, id: None})
    with pytest.raises(UsageError, match="trial is a fork of named and would write to its sink of accounts"):
        stream_definitions(named, forks=["trial"])
