"""What deletions took away, one row per pass: over every database a catalog can be in."""

from datetime import timedelta

import pytest

from siltstone.catalog.records import passes, runs
from siltstone.catalog.records.passes import RUNS, Pass, PassRecord
from siltstone.catalog.records.steps import Step
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.repository import Catalog
from tests.catalog_cases import NOON, Clock, commit_of


def doomed(*names: str) -> list[Tombstone]:
    return [Tombstone(name, 7, "of a test") for name in names]


def orphans(catalog: Catalog, by: Pass, *names: str) -> None:
    catalog.tombstones.record_orphans("flights", by.who, names, lambda _: doomed(*names), by)


def test_a_pass_is_one_row_whatever_it_takes_away_in_how_many_transactions(flights: Catalog) -> None:
    for id in range(1, 6):
        steps = [Step(id, id - 1, "v1\n{}\n")]
        flights.commits.add("flights", 1, commit_of(id, steps=steps, first={"aircraft": id}))
    by = Pass.begin("of a checkpoint that retention does not keep", "host:1")
    flights.deletions.mark("flights", 1, [1, 2, 3], by=by)
    flights.tombstones.record_deletion("flights", 1, by.who, doomed("a", "b"), by)
    assert flights.input_log.prune("flights", 1, at_least=1, by=by) == 2
    [found] = flights.passes.list("flights")
    assert found == PassRecord("flights", by.id, by.what, "host:1", found.began_at, 3, 2, 14, 2)
    again = Pass.begin(by.what, "host:1")
    flights.deletions.mark("flights", 1, [1, 2, 3], by=again)
    flights.tombstones.record_deletion("flights", 1, by.who, [], again)
    assert flights.passes.list("flights") == [found], "it took nothing away"


def test_a_sweep_is_one_row_however_many_objects_at_a_time(flights: Catalog, clock: Clock) -> None:
    first, second = Pass.begin("a sweep", "host:1"), Pass.begin("a sweep", "host:2")
    orphans(flights, first, "a", "b")
    clock.time += timedelta(minutes=1)
    orphans(flights, first, "c")
    orphans(flights, second, "d")
    assert [(p.who, p.objects, p.bytes, p.began_at) for p in flights.passes.list("flights")] == [
        ("host:1", 3, 21, NOON),
        ("host:2", 1, 7, NOON + timedelta(minutes=1)),
    ]
    assert [p.who for p in flights.passes.list("flights", 1)] == ["host:2"]
    assert len(flights.tombstones.list("flights")) == 4


def test_records_of_runs_that_are_forgotten_are_told_of(
    flights: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runs, "RUNS_KEPT", 3)
    caplog.set_level("INFO")
    before = len(flights.runs.list("flights"))
    for number in range(5):
        flights.runs.begin("flights", f"host:{number}")
    gone = before + 5 - len(flights.runs.list("flights"))
    found = flights.passes.list("flights")
    assert gone and sum(p.rows for p in found) == gone and {p.what for p in found} == {RUNS}
    assert "\n".join(caplog.messages).count("records of old runs were removed stream=flights") == len(found)


def test_passes_make_room_for_newer_ones(flights: Catalog, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES_MAX", 3)
    for number in range(5):
        clock.time += timedelta(minutes=1)
        orphans(flights, Pass.begin("a sweep", f"host:{number}"), f"name{number}")
    assert [p.who for p in flights.passes.list("flights")] == ["host:2", "host:3", "host:4"]
    clock.time += passes.PASSES_KEPT + timedelta(minutes=1)
    orphans(flights, Pass.begin("a sweep", "host:9"), "much later")
    assert [p.who for p in flights.passes.list("flights")] == ["host:9"]
