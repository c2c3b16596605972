"""When restored state is made by itself: evaluated in this process, over an instance in memory."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import date

import dagster as dg
import pytest

from siltstone.dagster import stream_definitions
from siltstone.dagster.checks.suites import SUITES
from siltstone.dagster.names import asset_key
from siltstone.pipes.parts import CHECKPOINTS, MATERIALIZATION, RESTORED_STATE
from siltstone.stream import Stream
from tests.fault.small_stream import SMALL

HOURS = "small__hours"
DAILY = replace(SMALL, event_days=(date(2020, 1, 1), date(2020, 1, 5)))


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(HOURS, ["2020-01-01-00", "2020-01-01-01"])
        yield instance


class Daemon:
    """What the daemon does at each tick, for the automation of one stream that is switched on."""

    def __init__(self, instance: dg.DagsterInstance, stream: Stream) -> None:
        self.instance, self.defs, self.cursor = instance, stream_definitions(stream), None

    def tick(self) -> set[str | None]:
        """The partitions that it launches; they are made at once."""
        restored = asset_key(SMALL.name, RESTORED_STATE)
        result = dg.evaluate_automation_conditions(self.defs, self.instance, cursor=self.cursor)
        self.cursor = result.cursor
        requested = set(result.get_requested_partitions(restored))
        for partition in requested:
            self.instance.report_runless_asset_event(dg.AssetMaterialization(restored, partition=partition))
        return requested

    def checkpoints(self, passed: bool = True) -> None:
        """A run of the stream, with its checks."""
        key = asset_key(SMALL.name, CHECKPOINTS)
        self.instance.report_runless_asset_event(dg.AssetMaterialization(key))
        for suite in SUITES:
            if suite.blocking and suite.name not in ("restore_equals_snapshot", "not_stalled"):
                self.instance.report_runless_asset_event(dg.AssetCheckEvaluation(key, suite.name, passed))


def test_days_only_the_newest_and_only_after_something_changed(instance: dg.DagsterInstance) -> None:
    daemon = Daemon(instance, DAILY)
    assert daemon.tick() == set()
    daemon.checkpoints()
    assert daemon.tick() == {"2020-01-05"}
    assert daemon.tick() == set()
    daemon.checkpoints()
    assert daemon.tick() == {"2020-01-05"}


def test_hours_those_that_are_new(instance: dg.DagsterInstance) -> None:
    daemon = Daemon(instance, SMALL)
    daemon.checkpoints()
    assert daemon.tick() == {"2020-01-01-00", "2020-01-01-01"}
    daemon.checkpoints()
    assert daemon.tick() == set()
    instance.add_dynamic_partitions(HOURS, ["2020-01-01-02"])
    daemon.checkpoints()
    assert daemon.tick() == {"2020-01-01-02"}
    assert daemon.tick() == set()


@pytest.mark.parametrize("stream", [DAILY, SMALL])
def test_nothing_is_restored_of_what_is_not_proven(instance: dg.DagsterInstance, stream: Stream) -> None:
    daemon = Daemon(instance, stream)
    daemon.tick()
    daemon.checkpoints(passed=False)
    assert daemon.tick() == set()
    daemon.checkpoints(passed=True)
    assert daemon.tick()


def test_a_materialization_of_chains_changes_nothing(instance: dg.DagsterInstance) -> None:
    daemon = Daemon(instance, DAILY)
    daemon.checkpoints()
    daemon.tick()
    instance.report_runless_asset_event(dg.AssetMaterialization(asset_key(SMALL.name, MATERIALIZATION)))
    assert daemon.tick() == set()
