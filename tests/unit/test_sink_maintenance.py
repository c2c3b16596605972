"""Merging and vacuuming a sink's table: no row is lost, and no file that a delivery or a writer may still need."""

import os
import time
from typing import Any

import pytest
from deltalake import DeltaTable

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError
from siltstone.sinks.maintenance import TableMaintenance, optimize_sinks
from tests.delta_run import TableRun, rows_in, sink_table, table_directory, table_files
from tests.outbox_run import NAME, SINK, batch, inputs, outstanding

DAY_S = 24 * 3600


def age(place: OpenWarehouse, names: set[str], days: float) -> None:
    """Let files have been written so many days ago."""
    then = time.time() - days * DAY_S
    for name in names:
        os.utime(place.warehouse.local.objects / name, (then, then))


def keep_removed_files(place: OpenWarehouse, interval: str) -> None:
    """How long the table keeps files that its log has removed, as its users set it."""
    table = sink_table(place).open()
    assert table is not None
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": interval})


def leave_orphan(place: OpenWarehouse, n: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A run stages a file and dies before its checkpoint has a manifest, which the next run would take over."""

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    before = table_files(place)
    with monkeypatch.context() as patch:
        patch.setattr("siltstone.run.pending.encode_manifest", die)
        with pytest.raises(Killed):
            TableRun(place).step(batch(n))
    return table_files(place) - before


def test_small_files_become_one_and_readers_see_the_same_rows(place: OpenWarehouse) -> None:
    run = TableRun(place)
    for n in range(1, 6):
        run.step(batch(n))
    old = table_files(place)
    done = optimize_sinks(place, NAME)
    assert done.tables == [TableMaintenance(SINK, merged=5, written=1)], "what the log has just removed stays"
    assert rows_in(place) == inputs([1, 2, 3, 4, 5]) and old < table_files(place)
    run.step(batch(6))
    assert rows_in(place) == inputs([1, 2, 3, 4, 5, 6]) and sink_table(place).find_delivered() == 6
    assert optimize_sinks(place, NAME, dry_run=True).tables == [TableMaintenance(SINK)]


def test_merged_files_are_deleted_once_the_table_keeps_them_no_longer(place: OpenWarehouse) -> None:
    run = TableRun(place)
    for n in (1, 2, 3):
        run.step(batch(n))
    old = table_files(place)
    keep_removed_files(place, "interval 0 seconds")
    run.region.close("done")
    assert optimize_sinks(place, NAME, dry_run=True).tables == [TableMaintenance(SINK)], "all of them are in the log"
    optimize_sinks(place, NAME)
    while old & table_files(place):  # which is younger than no time at all only in the next millisecond
        optimize_sinks(place, NAME)
    assert rows_in(place) == inputs([1, 2, 3])
    [record] = [r for r in place.catalog.tombstones.list(NAME) if r.name in old][:1]
    assert record.reason == "files that a sink's table no longer needs"


def test_a_file_of_an_outstanding_delivery_stays_however_old_it_is(place: OpenWarehouse) -> None:
    TableRun(place).step(batch(1))
    TableRun(place, delivers=False).step(batch(2))
    keep_removed_files(place, "interval 0 seconds")
    age(place, table_files(place), 400)
    assert outstanding(place) == [2]
    files = table_files(place)
    for _ in range(2):
        optimize_sinks(place, NAME)
    assert table_files(place) == files
    later = TableRun(place)
    assert later.given == [2] and rows_in(place) == inputs([1, 2])


def test_a_file_that_no_checkpoint_got_is_deleted_once_it_is_old_and_its_writer_fenced(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    TableRun(place).step(batch(1))
    orphan = leave_orphan(place, 2, monkeypatch)
    assert len(orphan) == 1
    age(place, orphan, 400)
    optimize_sinks(place, NAME)
    assert orphan <= table_files(place), "its writer could still commit it, however long it was frozen"
    run = TableRun(place)
    age(place, orphan, 6)
    optimize_sinks(place, NAME)
    assert orphan <= table_files(place), "younger than the 7 days of the table"
    age(place, orphan, 8)
    assert optimize_sinks(place, NAME, dry_run=True).tables[0].deleted == 1
    done = optimize_sinks(place, NAME)
    assert done.tables[0].deleted == 1 and not orphan & table_files(place)
    run.step(batch(2))
    assert rows_in(place) == inputs([1, 2])


def test_a_delivery_between_the_looks_at_the_log_and_at_the_catalog_loses_nothing(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the log is read the file is outstanding; then it is delivered, marked and forgotten."""
    TableRun(place).step(batch(1))
    TableRun(place, delivers=False).step(batch(2))
    keep_removed_files(place, "interval 0 seconds")
    age(place, table_files(place), 400)
    real = DeltaTable.vacuum

    def read_then_deliver(self: DeltaTable, **options: Any) -> list[str]:
        found = real(self, **options)
        monkeypatch.undo()
        TableRun(place).region.close("done")
        return found

    monkeypatch.setattr(DeltaTable, "vacuum", read_then_deliver)
    optimize_sinks(place, NAME)
    assert outstanding(place) == [] and place.catalog.outbox.list(NAME) == []
    assert rows_in(place) == inputs([1, 2])


def test_a_table_that_cannot_be_read_is_an_error_that_names_it(place: OpenWarehouse) -> None:
    TableRun(place).step(batch(1))
    for file in (table_directory(place) / "_delta_log").glob("*.json"):
        file.write_text("{")
    with pytest.raises(StateError, match=r"the table _sinks/tallies/by_key/ in file:///.*: "):
        optimize_sinks(place, NAME)
