"""A stream in a `dg` project: five lines of YAML, and no Python."""

import json
from collections.abc import Sequence
from datetime import timedelta

import dagster as dg
import pytest

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
    repository = both.get_repository_def()
    sensors = {each.name for each in repository.sensor_defs}
    assert sensors >= {f"siltstone__{name}" for name in ("recover_failed", "new_checkpoints", "alerts")}
    assert len(repository.sensor_defs) <= 4, "one of each kind"
    assert set(repository.job_names) >= {"small", "trial", "other", "siltstone__recover"}


def test_a_fork_that_would_write_to_its_parents_sink_is_refused() -> None:
    named = Stream("named", source=source, operators=SMALL.operators, sinks={"accounts": lambda rows, id: None})
    with pytest.raises(UsageError, match="trial is a fork of named and would write to its sink of accounts"):
        stream_definitions(named, forks=["trial"])
