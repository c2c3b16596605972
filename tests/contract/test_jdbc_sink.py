"""Tables of SQLite and PostgreSQL as sinks: each row is there once, if processes die and if older writers go on."""

import shutil
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sqlalchemy import MetaData, Table, inspect, select

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import CorruptObject, Fenced, StateError
from siltstone.sinks import jdbc
from siltstone.sinks.jdbc import MARKERS, JdbcSink, JdbcTable
from tests.jdbc_run import (
    TABLE,
    JdbcRun,
    begin_stream,
    connected,
    is_postgres,
    place,
    rows_in,
    run_sql,
    sink,
    stage,
    url,
    written_by,
)
from tests.killed_child import killed_at
from tests.outbox_run import NAME, SINK, Heard, Outboxed, batch, delete_stream, follow_log, inputs, roll_back
from tests.places import place_at

MARKED = f"SELECT id FROM {MARKERS}"
__all__ = ["place", "sink", "url"]  # the fixtures


def test_each_checkpoint_is_one_transaction_with_the_id_of_its_rows(
    place: OpenWarehouse, sink: JdbcSink, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large outputs are several objects and batches; other programs see none of their rows before all."""
    monkeypatch.setattr("siltstone.format.output.OBJECT_BYTES", 1 << 14)
    monkeypatch.setattr(jdbc, "BATCH_ROWS", 700)
    run = JdbcRun(place, sink)
    run.step(batch(1))
    seen = []

    name = "to_csv" if is_postgres(url) else "to_rows"
    convert = getattr(jdbc, name)

    def look(rows: pa.RecordBatch, *what: str, **options: Any) -> Any:
        seen.append((rows_in(url), rows_in(url, MARKED), rows.num_rows <= 700))
        return convert(rows, *what, **options)

    monkeypatch.setattr(jdbc, name, look)
    run.step(batch(2, 6_000))
    assert len(seen) > 8 and all(each == (inputs([1]), [1], True) for each in seen)
    assert rows_in(url) == sorted(inputs([1]) + inputs([2], 6_000)) and rows_in(url, MARKED) == [2]
    assert run.table.find_delivered() == 2 and run.table.list_published() == (set(), 3)


def test_an_id_that_comes_again_brings_nothing(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    table = written_by(place, sink)
    outputs = [stage(place, pa.table({"n": [10 * id, 10 * id + 1]}), id=id) for id in (1, 2)]
    for output in (outputs[0], outputs[0], outputs[1], outputs[0], outputs[1]):
        table.deliver(output)
        JdbcTable(sink, place, NAME, SINK).deliver(output)
    assert rows_in(url) == [10, 11, 20, 21] and rows_in(url, MARKED) == [2]


# What dies


def test_killed_at_any_moment_of_a_delivery_all_rows_are_there_once(
    place: OpenWarehouse, sink: JdbcSink, url: str
) -> None:
    """At each statement and commit, of the database and of the catalog, which marks the delivery."""

    def deliver() -> None:
        with OpenWarehouse.open_writable(str(place.warehouse.local.root)) as opened:
            table = JdbcTable(sink, opened, NAME, SINK)
            for output in opened.catalog.outbox.list(NAME, outstanding=True):
                table.deliver(output)
                epoch = opened.catalog.streams.get(NAME).epoch
                opened.catalog.outbox.mark_delivered(NAME, epoch, output.checkpoint, SINK)

    moment, seen, ended = 1, list[bool](), False
    while not ended:
        before = inputs(range(1, moment))
        Outboxed(place, Heard(), delivers=False).step(batch(moment))
        ended = killed_at(deliver, moment) > 0
        there = rows_in(url) if moment > 1 else []
        assert there in (before, sorted(before + inputs([moment])))
        seen.append(there != before)
        JdbcRun(place, sink).region.close("done")
        assert rows_in(url) == inputs(range(1, moment + 1))
        moment += 1
    assert False in seen and seen[-3:] == [True, True, True], "before the commit, and between it and the mark"


def test_a_staged_object_that_was_altered_brings_no_row_of_its_checkpoint(
    place: OpenWarehouse, sink: JdbcSink, url: str
) -> None:
    table = written_by(place, sink)
    table.deliver(stage(place, pa.table({"n": [1]})))
    parts = [pa.table({"n": [20 + number]}) for number in range(3)]
    output = stage(place, *parts, id=2)
    file = place.warehouse.local.objects / output.objects[2].name
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"?")
    with pytest.raises(CorruptObject):
        table.deliver(output)
    assert rows_in(url) == [1] and rows_in(url, MARKED) == [1]
    file.write_bytes(whole)
    table.deliver(output)
    assert rows_in(url) == [1, 20, 21, 22] and rows_in(url, MARKED) == [2]


# Older writers


def test_a_writer_that_wakes_up_in_its_delivery_writes_nothing(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    Outboxed(place, Heard(), delivers=False).step(batch(1))

    class Freezing(JdbcRun):
        def give(self, output: Any) -> None:
            newer = JdbcRun(place, sink)
            newer.step(batch(2))
            assert newer.given == [1, 2]
            super().give(output)

    with pytest.raises(Fenced):
        Freezing(place, sink)
    assert rows_in(url) == inputs([1, 2]) and rows_in(url, MARKED) == [2]


def test_of_two_deliveries_at_once_one_waits_and_writes_nothing(
    place: OpenWarehouse, sink: JdbcSink, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has written its rows, and not committed; the first delivery of all makes no difference."""
    begin_stream(place)
    write, waited = JdbcTable._write, list[bool]()  # noqa: SLF001 - to wait in it
    for id in (1, 2):
        output, others = stage(place, pa.table({"n": [id]}), id=id), list[threading.Thread]()

        def freeze(self: JdbcTable, *given: Any, output: Any = output, others: list[threading.Thread] = others) -> None:
            write(self, *given)
            if not others:
                others.append(threading.Thread(target=JdbcTable(sink, place, NAME, SINK).deliver, args=[output]))
                others[0].start()
                others[0].join(0.5)
                waited.append(others[0].is_alive())

        monkeypatch.setattr(JdbcTable, "_write", freeze)
        JdbcTable(sink, place, NAME, SINK).deliver(output)
        others[0].join()
    assert waited == [True, True] and rows_in(url) == [1, 2] and rows_in(url, MARKED) == [2]


# Streams of one name


def test_streams_of_one_name_in_two_warehouses_share_a_table(sink: JdbcSink, url: str, tmp_path: Path) -> None:
    """They began at the same moment."""

    def now() -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    with place_at(tmp_path / "one", now) as one, place_at(tmp_path / "other", now) as other:
        runs = [JdbcRun(each, sink) for each in (one, other)]
        for n in (1, 2):
            for number, run in enumerate(runs):
                run.step(batch(10 * number + n))
        JdbcRun(one, sink).step(batch(3))
    assert rows_in(url) == inputs([1, 2, 3, 11, 12]) and sorted(rows_in(url, MARKED)) == [2, 3]


@pytest.mark.parametrize("deletes", ["the warehouse", "the stream"])
def test_a_stream_that_was_deleted_and_begins_again_loses_nothing(
    place: OpenWarehouse, sink: JdbcSink, url: str, deletes: str
) -> None:
    run = JdbcRun(place, sink)
    for n in (1, 2, 3):
        run.step(batch(n))
    run.region.close("done")
    root = place.warehouse.local.root
    if deletes == "the stream":
        delete_stream(place)
    else:
        place.catalog.close()
        shutil.rmtree(root)
    with place_at(root) as again:
        run = JdbcRun(again, sink)
        for n in (4, 5):
            run.step(batch(n))
        assert run.given == [1, 2]
    assert rows_in(url) == inputs([1, 2, 3, 4, 5])


def test_a_rebuilt_catalog_knows_what_the_table_has(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    """The store does not say whether a sink got the newest output, so it comes again."""
    run = JdbcRun(place, sink)
    for n in (1, 2):
        run.step(batch(n))
    before = run.table.marker
    place.catalog.close()
    for ending in ("", "-wal", "-shm"):
        (place.warehouse.local.root / f"catalog.db{ending}").unlink(missing_ok=True)
    rebuild_catalog(place.warehouse, place.warehouse.catalog_url)
    with place_at(place.warehouse.local.root) as again:
        run = JdbcRun(again, sink)
        assert run.table.marker == before and 2 in run.given
        run.step(batch(3))
    assert rows_in(url) == inputs([1, 2, 3])


def test_rolled_back_checkpoints_come_again_without_rows(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    run = JdbcRun(place, sink)
    for n in (1, 2, 3):
        run.step(batch(n))
    roll_back(place, 1)
    again = JdbcRun(place, sink)
    follow_log(again)
    again.step(batch(4))
    assert again.given == [4] and rows_in(url) == inputs([1, 2, 3, 4])


# Keys


def test_with_a_key_the_last_row_stays_of_each_checkpoint_and_of_all(
    place: OpenWarehouse, sink: JdbcSink, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jdbc, "BATCH_ROWS", 3)
    run, totals = JdbcRun(place, replace(sink, key="k"), checkpoint_steps=2), dict[int, int]()
    last = dict[int, int]()
    for n in range(1, 7):
        rows = batch(n, 20 - n)
        run.step(rows)
        for k, added in zip(rows["k"].to_pylist(), rows["n"].to_pylist(), strict=True):
            totals[k], last[k] = totals.get(k, 0) + added, added
    expected = [(k, last[k], totals[k]) for k in sorted(totals)]
    assert run.given == [1, 2, 3] and rows_in(url, f"SELECT k, n, sum FROM {TABLE} ORDER BY k") == expected


def test_the_order_of_rows_is_that_of_objects_and_of_rows_within(
    place: OpenWarehouse, sink: JdbcSink, url: str
) -> None:
    table = written_by(place, replace(sink, key=["a", "b"]))
    parts = [[(1, "x", 1), (1, "x", 2), (1, "y", 3)], [(2, "x", 4), (1, "x", 5)], [(2, "x", 6), (2, "x", None)]]
    columns = ["a", "b", "n"]
    table.deliver(stage(place, *(pa.Table.from_pylist([dict(zip(columns, r, strict=True)) for r in p]) for p in parts)))
    query = f"SELECT a, b, n FROM {TABLE} ORDER BY a, b"
    assert rows_in(url, query) == [(1, "x", 5), (1, "y", 3), (2, "x", None)]
    table.deliver(stage(place, pa.table({"a": [2], "b": ["x"], "n": [7]}), id=2))
    assert rows_in(url, query) == [(1, "x", 5), (1, "y", 3), (2, "x", 7)]


def test_a_key_of_all_columns_keeps_each_row_once(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    table = written_by(place, replace(sink, key="n"))
    for id in (1, 2):
        table.deliver(stage(place, pa.table({"n": [1, 2, 1, id]}), id=id))
    assert rows_in(url) == [1, 2]
    with connected(url) as connection:
        [column] = inspect(connection).get_columns(TABLE)
    assert column["default"] is None and not column["nullable"], "the database makes up no key"


def test_a_null_in_a_key_is_refused(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    """A unique constraint takes any number of nulls: such rows would be added each time."""
    run_sql(url, f"CREATE TABLE {TABLE} (n BIGINT UNIQUE)") if is_postgres(url) else None
    table = written_by(place, replace(sink, key="n"))
    with pytest.raises(StateError, match="column n of its key is null"):
        table.deliver(stage(place, pa.table({"n": [1, None]})))
    assert rows_in(url) == []


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_not_a_number_in_a_key_is_a_null_in_sqlite_alone(
    place: OpenWarehouse, sink: JdbcSink, url: str, kind: pa.DataType
) -> None:
    run_sql(url, f"CREATE TABLE {TABLE} (n DOUBLE PRECISION UNIQUE)")
    table = written_by(place, replace(sink, key="n"))
    outputs = [stage(place, pa.table({"n": pa.array(np.array([0.5, np.nan]), kind)}), id=id) for id in (1, 2)]
    if is_postgres(url):
        for output in outputs:
            table.deliver(output)
        assert rows_in(url, f"SELECT count(*) FROM {TABLE}") == [2]
        return
    with pytest.raises(StateError, match="column n of its key is null"):
        table.deliver(outputs[0])
    assert rows_in(url) == []


NAMES = ["a%b", "select", "Capital", 'quo"te', "%s : d.e [f]", ":c"]


@pytest.mark.parametrize("key", ["", NAMES[0], NAMES[2], NAMES[4]])
@pytest.mark.parametrize("name", ["Order lines", "user", "50%", 'quo"te'])
def test_names_of_tables_and_columns_may_be_any(place: OpenWarehouse, sink: JdbcSink, key: str, name: str) -> None:
    assert isinstance(sink.url, str)
    table = written_by(place, replace(sink, table=name, key=key or ()))
    for id in (1, 2):
        table.deliver(stage(place, pa.table({each: [1, 2] for each in NAMES}), id=id))
    with connected(sink.url) as connection:
        found = list(connection.execute(select(Table(name, MetaData(), autoload_with=connection))))
    assert sorted(found) == sorted([(1,) * len(NAMES), (2,) * len(NAMES)] * (1 if key else 2))
