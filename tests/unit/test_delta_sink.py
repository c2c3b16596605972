"""The Delta sink: each checkpoint's rows are in the table exactly once, whatever dies and whoever wakes up."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import fork
from siltstone.errors import CorruptObject, Fenced, UsageError
from siltstone.operator import Rows, State
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.sinks.delta import SinkTable
from tests.delta_run import TableRun, rows_in, sink_table, table_files
from tests.outbox_run import (
    NAME,
    SINK,
    STREAM,
    Heard,
    Outboxed,
    Tallies,
    batch,
    follow_log,
    inputs,
    outstanding,
    roll_back,
)
from tests.widened_output import LARGE, SMALL, Small, check_widened, widened


class Killed(BaseException):
    """The process ends here."""


def die(*_: object, **__: object) -> None:
    raise Killed


def opened(place: OpenWarehouse) -> Any:
    table = sink_table(place).open()
    assert table is not None
    return table


def test_each_checkpoint_is_one_transaction_whose_files_are_those_that_were_staged(place: OpenWarehouse) -> None:
    run = TableRun(place)
    for n in (1, 2, 3):
        run.step(batch(n))
    assert rows_in(place) == inputs([1, 2, 3]) and sink_table(place).find_delivered() == 3
    staged = table_files(place)
    run.region.close("done")
    sweep(place, NAME)
    assert table_files(place) == staged and len(staged) == 3, "small parts of a checkpoint are one file"
    assert outstanding(place) == [] and place.catalog.outbox.list(NAME) == []
    history = opened(place).history()
    assert [entry.get("siltstone.checkpoint") for entry in history] == [3, 2, 1, None], "and the table's creation"
    assert sink_table(place).list_published() == ({1, 2, 3}, 1)
    size = sink_table(place).describe()
    files = place.warehouse.local.objects
    assert (size.rows, size.bytes) == (30, sum((files / name).stat().st_size for name in staged))


def test_large_output_is_written_by_the_tasks_as_files_of_their_own(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.format.table_file.ROW_GROUP_BYTES", 1 << 17)
    monkeypatch.setattr("siltstone.format.table_file.OBJECT_BYTES", 1 << 14)
    run = TableRun(place, checkpoint_steps=2)
    run.step(batch(1, 60_000))
    run.step(batch(2, 60_000))
    names = table_files(place)
    assert len(names) == 4 and not any("driver" in name for name in names), "one per subtask and step"
    assert rows_in(place) == inputs([1, 2], 60_000) and sink_table(place).find_delivered() == 1
    actions = pa.table(opened(place).get_add_actions(flatten=True))
    assert sum(actions.column("num_records").to_pylist()) == 120_000 and actions.num_rows == 4
    assert min(actions.column("min.n").to_pylist()) == 1000 and max(actions.column("max.n").to_pylist()) == 61_999


def test_a_checkpoint_without_rows_is_no_transaction(place: OpenWarehouse) -> None:
    run = TableRun(place)
    run.step(batch(1, 0))
    run.step(batch(2))
    assert sink_table(place).find_delivered() == 2 and rows_in(place) == inputs([2])
    run.step(batch(3, 0))
    assert sink_table(place).find_delivered() == 2


# What dies


@pytest.mark.parametrize("moment", ["before the log", "after the log"])
def test_killed_around_the_commit_of_the_log_the_rows_are_there_once(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = TableRun(place)
    run.step(batch(1))
    with monkeypatch.context() as patch:
        if moment == "before the log":
            patch.setattr(SinkTable, "deliver", die)
        else:
            patch.setattr(type(place.catalog.outbox), "mark_delivered", die)
        with pytest.raises(Killed):
            run.step(batch(2))
    assert rows_in(place) == inputs([1] if moment == "before the log" else [1, 2])
    later = TableRun(place)
    assert later.given == [2] and rows_in(place) == inputs([1, 2])
    later.step(batch(3))
    assert rows_in(place) == inputs([1, 2, 3])


def test_killed_before_the_commit_what_was_staged_is_no_reader_s_until_the_next_run_commits_it(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TableRun(place)
    run.step(batch(1))
    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.commits), "add", die)
        with pytest.raises(Killed):
            run.step(batch(2, 4))
    assert len(table_files(place)) == 2 and rows_in(place) == inputs([1])
    later = TableRun(place)
    assert later.batches == 2 and rows_in(place) == sorted([*inputs([1]), *inputs([2], 4)])
    later.step(batch(3, 7))
    assert rows_in(place) == sorted([*inputs([1]), *inputs([2], 4), *inputs([3], 7)])


def test_staged_rows_that_were_altered_are_never_added(place: OpenWarehouse) -> None:
    TableRun(place, delivers=False).step(batch(1))
    [name] = table_files(place)
    file = place.warehouse.local.objects / name
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptObject, match="tallies"):
        TableRun(place)
    assert sink_table(place).open() is None


# Older writers


def test_a_writer_that_wakes_up_in_its_delivery_adds_nothing_twice(place: OpenWarehouse) -> None:
    """It had opened the table before the newer writer added the same checkpoint, and the next."""
    TableRun(place, delivers=False).step(batch(1))

    class Freezing(TableRun):
        def give(self, output: OutputRecord) -> None:
            newer = TableRun(place)
            newer.step(batch(2))
            assert newer.given == [1, 2]
            super().give(output)

    with pytest.raises(Fenced):
        Freezing(place)
    assert rows_in(place) == inputs([1, 2])


def test_of_two_deliveries_at_once_the_log_takes_one(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one is frozen between its look at the table and its commit."""
    run = TableRun(place)
    run.step(batch(1))
    TableRun(place, delivers=False).step(batch(2))
    [output] = place.catalog.outbox.list(NAME, outstanding=True)
    real, frozen = DeltaTable.transaction_version, []

    def freeze(self: DeltaTable, application: str) -> int | None:
        found = real(self, application)
        if not frozen:
            frozen.append(found)
            sink_table(place).deliver(output)
        return found

    monkeypatch.setattr(DeltaTable, "transaction_version", freeze)
    sink_table(place).deliver(output)
    assert frozen == [1] and rows_in(place) == inputs([1, 2]) and sink_table(place).find_delivered() == 2


# What comes again


def test_rolled_back_checkpoints_come_again_without_rows(place: OpenWarehouse) -> None:
    run = TableRun(place)
    for n in (1, 2, 3):
        run.step(batch(n))
    roll_back(place, 1)
    again = TableRun(place)
    follow_log(again)
    again.step(batch(4))
    assert again.region.completed == 4 and again.given == [4] and rows_in(place) == inputs([1, 2, 3, 4])


def test_a_fork_has_a_table_of_its_own(place: OpenWarehouse) -> None:
    run = TableRun(place)
    for n in (1, 2):
        run.step(batch(n))
    fork(place, NAME, "what-if", "1")
    other = TableRun(place, stream=replace(STREAM, name="what-if"))
    other.step(batch(3))
    assert rows_in(place) == inputs([1, 2]) and rows_in(place, "what-if") == inputs([3])
    applications = {sink_table(place, name).application for name in (NAME, "what-if")}
    assert applications == {"siltstone:tallies/by_key", "siltstone:what-if/by_key"}


def test_retention_of_checkpoints_removes_no_row(place: OpenWarehouse) -> None:
    run = TableRun(place)
    for n in range(1, 6):
        run.step(batch(n))
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    run.region.close("done")
    sweep(place, NAME)
    assert [c.id for c in place.catalog.checkpoints.list(NAME)] == [5] and rows_in(place) == inputs([1, 2, 3, 4, 5])


# Columns


class Wider(Tallies):
    """Its output has one more column, and lacks another."""

    output = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("note", pa.string())])

    def process(self, rows: Rows, state: State) -> pa.Table:
        note = pa.array(["new"] * len(rows), pa.string())
        return rows.table.select(["k", "n"]).append_column("note", note)


def test_a_new_column_is_added_to_the_table_and_one_that_is_gone_is_null(place: OpenWarehouse) -> None:
    TableRun(place).step(batch(1))
    wider = replace(STREAM, operators=[Wider(name=SINK)])
    TableRun(place, stream=wider).step(batch(2, 3))
    assert rows_in(place) == inputs([1]) + inputs([2], 3)
    found = opened(place).to_pyarrow_table()
    assert found.column("note").null_count == 10 and found.column("sum").null_count == 3


def test_a_column_of_another_type_is_refused_before_the_run(place: OpenWarehouse) -> None:
    TableRun(place).step(batch(1))
    with pytest.raises(UsageError, match=r"column n of the output of by_key is .*string.* the table has n, .*long"):
        sink_table(place).check(pa.schema([("k", pa.int64()), ("n", pa.string())]))
    with pytest.raises(UsageError, match="column N of the output"):
        sink_table(place).check(pa.schema([("N", pa.int64())]))


def test_rows_staged_for_another_kind_of_sink_reach_the_table(place: OpenWarehouse) -> None:
    """The definition got a Delta sink while an output for a function was outstanding."""
    Outboxed(place, Heard(), delivers=False).step(batch(1))
    run = TableRun(place)
    run.step(batch(2))
    assert run.given == [1, 2] and rows_in(place) == inputs([1, 2])


# Wider columns


@pytest.mark.parametrize("moment", ["", "writing", "widened", "marked"])
def test_wider_columns_are_in_the_whole_table_whatever_dies(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    for n in (1, 2):
        widened(place, large=False).step(batch(n))
    with monkeypatch.context() as patch:
        if moment == "writing":
            patch.setattr(DeltaTable, "create_write_transaction", die)
        elif moment == "widened":
            patch.setattr(SinkTable, "_add", die)
        elif moment == "marked":
            patch.setattr(type(place.catalog.outbox), "mark_delivered", die)
        run = widened(place, large=True)
        if moment:
            with pytest.raises(Killed):
                run.step(batch(3))
        else:
            run.step(batch(3))
    run = widened(place, large=True)
    run.step(batch(4))
    check_widened(place, [1, 2, 3, 4])
    for path in opened(place).file_uris():  # each engine that reads the files sees the same types
        assert pq.read_schema(path.removeprefix("file://")).field("n").type == pa.int64()
    run.region.close("done")
    sweep(place, NAME)
    check_widened(place, [1, 2, 3, 4])
    with pytest.raises(UsageError, match=r"its type may only become wider"):
        sink_table(place).check(SMALL)


def test_rows_of_before_are_delivered_before_the_table_is_widened(place: OpenWarehouse) -> None:
    widened(place, large=False).step(batch(1))
    widened(place, large=False, delivers=False).step(batch(2))
    sink_table(place).check(LARGE)
    run = widened(place, large=True)
    assert run.given == [2] and opened(place).to_pyarrow_table().schema.field("n").type == pa.int32()
    run.step(batch(3))
    check_widened(place, [1, 2, 3])


def test_a_writer_that_wakes_up_after_the_table_is_widened_adds_nothing(place: OpenWarehouse) -> None:
    widened(place, large=False, delivers=False).step(batch(1))

    class Freezing(TableRun):
        def give(self, output: OutputRecord) -> None:
            newer = widened(place, large=True)
            for n in (2, 3):
                newer.step(batch(n))
            super().give(output)

    with pytest.raises(Fenced):
        Freezing(place, stream=replace(STREAM, operators=[Small(name=SINK)]))
    assert rows_in(place) == inputs([1, 2, 3])
    assert opened(place).to_pyarrow_table().schema.field("n").type == pa.int64()


def test_a_struct_with_more_fields_needs_no_row_to_be_written_again(place: OpenWarehouse) -> None:
    struct, files = pa.struct({"a": pa.int32(), "b": pa.list_(pa.struct({"c": pa.int8()}))}), list[set[str]]()
    for n, kind in enumerate((SMALL, pa.schema([f.with_type(struct) if f.name == "s" else f for f in SMALL])), 1):
        operator = type("Grown", (Small,), {"output": kind})(name=SINK)
        TableRun(place, stream=replace(STREAM, operators=[operator])).step(batch(n))
        files.append(set(opened(place).file_uris()))
    table = opened(place).to_pyarrow_table()
    assert files[0] < files[1] and table.schema.field("s").type.num_fields == 2
    assert rows_in(place) == inputs([1, 2]) and all(row["b"] is None for row in table["s"].to_pylist())
