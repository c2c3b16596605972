"""Tables of SQLite and PostgreSQL as sinks: each row is there once, whatever dies and whoever wakes up."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sqlalchemy import MetaData, Table, inspect, select

from siltstone.catalog.database.tables import METADATA
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import CorruptObject, Fenced, StateError, UsageError
from siltstone.operator import Rows, State
from siltstone.sinks import jdbc
from siltstone.sinks.jdbc import MARKERS, JdbcSink, JdbcTable
from siltstone.store.paths import epoch_marks, extract_prefix, stream_prefix
from tests.catalog_cases import engine_of
from tests.jdbc_run import TABLE, JdbcRun, begin_stream, connected, rows_in, run_sql, stage
from tests.killed_child import killed_at
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, Tallies, batch, follow_log, inputs, roll_back
from tests.places import place_at

MARKED = f"SELECT id FROM {MARKERS}"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with place_at(tmp_path / "w") as opened:
        yield opened


@pytest.fixture
def sink(catalog_url: str) -> JdbcSink:
    """A sink that adds rows, in a database of each kind."""
    return JdbcSink(catalog_url.replace("catalog.db", "sales.db"), TABLE)


@pytest.fixture
def url(sink: JdbcSink) -> str:
    assert isinstance(sink.url, str)
    return sink.url


def written_by(place: OpenWarehouse, sink: JdbcSink) -> JdbcTable:
    """The table of a stream that has begun."""
    begin_stream(place)
    return JdbcTable(sink, place, NAME, SINK)


def is_postgres(url: str) -> bool:
    return url.startswith("postgresql")


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
    write, waited = JdbcTable._write, list[bool]()  # noqa: SLF001
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


def begin_again(place: OpenWarehouse) -> None:
    """Delete a stream: no command does it, but people do."""
    engine = engine_of(place.catalog.url)
    with engine.begin() as connection:
        for table in reversed(METADATA.sorted_tables):
            if "stream" in table.c:
                connection.execute(table.delete().where(table.c.stream == NAME))
            elif table.name == "stream":
                connection.execute(table.delete().where(table.c.name == NAME))
    engine.dispose()
    for prefix in (stream_prefix(NAME), epoch_marks(NAME), extract_prefix(NAME)):
        place.warehouse.store.delete([name for name, _ in place.warehouse.store.list(prefix)])


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
        begin_again(place)
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


NAMES = ["a%b", "select", "Capital", 'quo"te', "%(n)s : d.e [f]", ":c"]


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


# Types

VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 127]),
    (pa.int16(), [-32768, 32767]),
    (pa.int32(), [-(2**31), 2**31 - 1]),
    (pa.int64(), [-(2**63), 2**63 - 1]),
    (pa.uint8(), [0, 255]),
    (pa.uint16(), [0, 65535]),
    (pa.uint32(), [0, 2**32 - 1]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.float16(), [0.5, -65504.0]),
    (pa.float32(), [0.5, -3.4028234663852886e38]),
    (pa.float64(), [0.1, 1.7976931348623157e308]),
    (pa.float64(), [float("inf"), float("-inf")]),
    (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789"), Decimal("-0.0000000001")]),
    (pa.decimal256(50, 2), [Decimal("9" * 48 + ".99"), Decimal("0.00")]),
    (pa.bool_(), [True, False]),
    (pa.string(), ["", "ä ☂ '\"\\ \n %s :n"]),
    (pa.large_string(), ["x", "y" * 100_000]),
    (pa.string_view(), ["\\.", "\r\n,;\t"]),
    (pa.binary(), [b"", bytes(range(256))]),
    (pa.binary_view(), [b"\\x00", b"\n"]),
    (pa.large_binary(), [b"", b'",']),
    (pa.binary(3), [b"abc", b"\0\0\0"]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.time64("us"), [time(0, 0), time(23, 59, 59, 999999)]),
    (pa.timestamp("us"), [datetime(1970, 1, 1), datetime(2026, 3, 29, 2, 30, 0, 1)]),
    (pa.timestamp("ms"), [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999000)]),
    (pa.timestamp("us", "UTC"), [datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 3, 29, 2, 30, 0, 1, UTC)]),
    (pa.timestamp("s", "Asia/Tokyo"), [datetime(1950, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]),
]


def read_value(value: Any, kind: pa.DataType, url: str) -> Any:
    """What a reader makes of a value that the database gives it."""
    if value is None:
        return None
    if pa.types.is_float32(kind):
        return float(np.float32(value))
    if pa.types.is_decimal(kind) or pa.types.is_uint64(kind):
        return Decimal(value)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.astimezone(UTC) if is_postgres(url) else value.replace(tzinfo=UTC)
    return value


@pytest.mark.parametrize("key", ["", "id"], ids=["added", "by key"])
def test_values_of_every_type_come_back(place: OpenWarehouse, sink: JdbcSink, url: str, key: str) -> None:
    arrays = {f"c{n}": pa.array([*values, None], kind) for n, (kind, values) in enumerate(VALUES)}
    rows = pa.table({"id": [0, 1, 2], **arrays})
    table = written_by(place, replace(sink, key=key or ()))
    table.check(rows.schema)
    table.deliver(stage(place, rows))
    table.check(rows.schema)
    with connected(url) as connection:
        there = Table(TABLE, MetaData(), autoload_with=connection)
        found = list(connection.execute(select(there).order_by(there.c.id)))
    for n, (kind, values) in enumerate(VALUES):
        read = [read_value(getattr(row, f"c{n}"), kind, url) for row in found]
        assert read == [*values, None], kind


def test_nothing_and_no_text_are_two_values(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    written_by(place, sink).deliver(stage(place, pa.table({"n": [None, "", '""', None]})))
    assert sorted(rows_in(url, f"SELECT coalesce(n, 'null') FROM {TABLE}")) == ["", '""', "null", "null"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pa.list_(pa.int64()), "takes no nested values: let the operator return its parts as columns of their own"),
        (pa.struct({"a": pa.int64()}), "takes no nested values"),
        (pa.map_(pa.string(), pa.int64()), "takes no nested values"),
        (pa.timestamp("ns", "UTC"), r'declare timestamp\("us", tz="UTC"\)'),
        (pa.time64("ns"), "declare int64, in microseconds"),
        (pa.duration("us"), "declare int64, in microseconds"),
        (pa.decimal128(5, -2), "declare decimal128"),
        (pa.dictionary(pa.int32(), pa.string()), "declare string"),
        (pa.null(), "declare the type of its values"),
    ],
)
def test_a_type_that_a_database_lacks_is_refused_by_name(
    place: OpenWarehouse, sink: JdbcSink, kind: pa.DataType, reason: str
) -> None:
    with pytest.raises(UsageError, match=f"stream tallies: the output of by_key: column x is .*{reason}"):
        JdbcTable(sink, place, NAME, SINK).check(pa.schema({"k": pa.int64(), "x": kind}))


# Tables that are there

SCHEMA = pa.schema({"k": pa.int64(), "n": pa.int32(), "t": pa.string()})


def test_a_schema_that_is_missing_is_refused_before_the_run(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    run_sql(url, "CREATE TABLE other (k BIGINT)")
    with pytest.raises(UsageError, match=r"table nowhere\.tallied in .*: there is no schema nowhere: create it"):
        JdbcTable(replace(sink, table=f"nowhere.{TABLE}"), place, NAME, SINK).check(SCHEMA)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("k BIGINT, n INTEGER", "has no column t, which the output has .the table has k, n.: add it, as TEXT"),
        ("k TEXT, n INTEGER, t TEXT", "column k is TEXT, and the output's is BIGINT"),
        ("k BIGINT, n INTEGER, t DATE", "column t is DATE, and the output's is TEXT"),
        ("k BIGINT, n INTEGER, t TEXT, u INTEGER NOT NULL", "column u must not be null and has no default"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_before_the_run(
    place: OpenWarehouse, sink: JdbcSink, url: str, columns: str, reason: str
) -> None:
    run_sql(url, f"CREATE TABLE {TABLE} ({columns})")
    with pytest.raises(UsageError, match=f"table {TABLE} in .*{reason}"):
        JdbcTable(sink, place, NAME, SINK).check(SCHEMA)


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ("k INTEGER, n INTEGER, t TEXT", "k"),
        ("k DOUBLE PRECISION, n INTEGER, t TEXT", "k"),
        ("k BIGINT, n SMALLINT, t TEXT", "n"),
        ("k NUMERIC(10, 0), n INTEGER, t TEXT", "k"),
        ("k BIGINT, n INTEGER, t JSONB", "t"),
        ("k BIGINT, n INTEGER, t CHAR(80)", "t"),
        ('k BIGINT, n INTEGER, t "char"', "t"),
        ("k BIGINT, n INTEGER, t NAME", "t"),
    ],
)
def test_a_type_that_cannot_take_all_values_is_refused(
    schema: Any, place: OpenWarehouse, columns: str, column: str
) -> None:
    url = schema.render_as_string(hide_password=False)
    run_sql(url, f"CREATE TABLE {TABLE} ({columns})")
    with pytest.raises(UsageError, match=f"column {column} is"):
        JdbcTable(JdbcSink(url, TABLE), place, NAME, SINK).check(SCHEMA)


@pytest.mark.parametrize(
    ("there", "kind", "reason"),
    [
        ("TIMESTAMP(0)", pa.timestamp("us"), r"TIMESTAMP\(0\), and the output's is DATETIME:"),
        (
            "TIMESTAMPTZ(3)",
            pa.timestamp("us", "UTC"),
            r"TIMESTAMP\(3\) WITH TIME ZONE, and .* DATETIME WITH TIME ZONE:",
        ),
        ("TIME(3)", pa.time64("us"), r"TIME\(3\), and the output's is TIME:"),
        ("TIME WITH TIME ZONE", pa.time64("us"), "TIME WITH TIME ZONE, and the output's is TIME:"),
    ],
)
def test_a_time_that_would_be_rounded_or_get_a_zone_is_refused(
    schema: Any, place: OpenWarehouse, there: str, kind: pa.DataType, reason: str
) -> None:
    url = schema.render_as_string(hide_password=False)
    run_sql(url, f"CREATE TABLE {TABLE} (t {there})")
    with pytest.raises(UsageError, match=f"column t is {reason}"):
        JdbcTable(JdbcSink(url, TABLE), place, NAME, SINK).check(pa.schema({"t": kind}))
    run_sql(url, f"ALTER TABLE {TABLE} ALTER t TYPE {kind_of(kind)}(6)")
    JdbcTable(JdbcSink(url, TABLE), place, NAME, SINK).check(pa.schema({"t": kind}))


def kind_of(kind: pa.DataType) -> str:
    return "TIME" if pa.types.is_time(kind) else "TIMESTAMP" if kind.tz is None else "TIMESTAMPTZ"


def test_a_column_that_the_database_generates_is_refused(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    run_sql(url, f"CREATE TABLE {TABLE} (k BIGINT, n INTEGER, t TEXT GENERATED ALWAYS AS ('x') STORED)")
    with pytest.raises(UsageError, match="column t is generated by the database, and the output has it, too"):
        JdbcTable(sink, place, NAME, SINK).check(SCHEMA)


REFUSE = (
    "CREATE FUNCTION refuse() RETURNS TRIGGER AS 'BEGIN RAISE ''not %'', NEW.k USING ERRCODE = ''U0001''; END' "
    "LANGUAGE plpgsql"
)


@pytest.mark.parametrize(
    ("key", "statements", "reason"),
    [
        ("k", [f"CREATE TABLE {TABLE} (k BIGINT PRIMARY KEY DEFERRABLE)"], "deferrable unique constraints"),
        ("", [f"CREATE TABLE {TABLE} (k BIGINT UNIQUE DEFERRABLE INITIALLY DEFERRED)"], "duplicate key value"),
        (
            "",
            [
                f"CREATE TABLE {TABLE} (k BIGINT)",
                REFUSE,
                f"CREATE TRIGGER t BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION refuse()",
            ],
            "not 1",
        ),
        ("", ["CREATE TABLE b (k BIGINT)", f"CREATE VIEW {TABLE} AS SELECT * FROM b"], "cannot copy to view"),
    ],
    ids=["deferrable key", "deferred constraint", "trigger", "view"],
)
def test_what_postgresql_refuses_is_no_outage(
    schema: Any, place: OpenWarehouse, key: str, statements: list[str], reason: str
) -> None:
    """A run would reset itself for an outage, again and again."""
    url = schema.render_as_string(hide_password=False)
    run_sql(url, *statements)
    table = written_by(place, JdbcSink(url, TABLE, key or ()))
    with pytest.raises(StateError, match=f"which refuses the rows of checkpoint 1: .*{reason}"):
        table.deliver(stage(place, pa.table({"k": [1, 1]})))


def test_what_sqlite_refuses_is_no_outage(place: OpenWarehouse, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sales.db"
    run_sql(url, "CREATE TABLE b (k BIGINT)", f"CREATE VIEW {TABLE} AS SELECT * FROM b")
    with pytest.raises(
        StateError, match="refuses the rows of checkpoint 1: cannot modify tallied because it is a view"
    ):
        written_by(place, JdbcSink(url, TABLE)).deliver(stage(place, pa.table({"k": [1]})))


def test_a_table_of_wider_columns_and_more_of_them_is_filled(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    run_sql(
        url,
        f"CREATE TABLE {TABLE} (u INTEGER DEFAULT 7, t VARCHAR(5), n BIGINT, k BIGINT PRIMARY KEY, v TEXT)",
    )
    table = written_by(place, replace(sink, key="k"))
    table.check(SCHEMA)
    table.deliver(stage(place, pa.table({"k": [1, 2], "n": [3, 4], "t": ["a", None]}, SCHEMA)))
    assert rows_in(url, f"SELECT * FROM {TABLE} ORDER BY k") == [(7, "a", 3, 1, None), (7, None, 4, 2, None)]


def test_a_key_needs_a_constraint_of_its_columns(place: OpenWarehouse, sink: JdbcSink, url: str) -> None:
    run_sql(url, f"CREATE TABLE {TABLE} (k BIGINT PRIMARY KEY, n INTEGER, t TEXT)")
    JdbcTable(replace(sink, key="k"), place, NAME, SINK).check(SCHEMA)
    keyed = JdbcTable(replace(sink, key=["t", "n"]), place, NAME, SINK)
    with pytest.raises(UsageError, match="has no primary key or unique constraint of the columns t, n"):
        keyed.check(SCHEMA)
    run_sql(url, f"CREATE UNIQUE INDEX partly ON {TABLE} (n, t) WHERE n > 0")
    with pytest.raises(UsageError, match="has no primary key or unique constraint of the columns t, n"):
        keyed.check(SCHEMA)
    run_sql(url, f"CREATE UNIQUE INDEX whole ON {TABLE} (n, t)")
    keyed.check(SCHEMA)
    with pytest.raises(UsageError, match="the output of by_key has no column z, which the key"):
        JdbcTable(replace(sink, key="z"), place, NAME, SINK).check(SCHEMA)


def test_rows_that_a_constraint_refuses_are_not_tried_again_and_come_first_once_they_fit(
    place: OpenWarehouse, sink: JdbcSink, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sql(url, f"CREATE TABLE {TABLE} (k BIGINT, n BIGINT, sum BIGINT, CHECK (n < 2009))")
    run = JdbcRun(place, sink)
    run.step(batch(1))
    tried, deliver = list[int](), JdbcTable._deliver  # noqa: SLF001

    def count(self: JdbcTable, output: Any) -> None:
        tried.append(output.sink_id)
        deliver(self, output)

    monkeypatch.setattr(JdbcTable, "_deliver", count)
    with pytest.raises(StateError, match=r"table tallied in .*, which refuses the rows of checkpoint 2: .*") as caught:
        run.step(batch(2))
    assert tried == [2] and "[SQL" not in str(caught.value) and rows_in(url) == inputs([1])
    run_sql(url, f"DROP TABLE {TABLE}")
    assert JdbcRun(place, sink).given == [2]
    assert rows_in(url) == inputs([2])


def test_a_column_that_is_gone_from_the_output_is_null_in_new_rows(
    place: OpenWarehouse, sink: JdbcSink, url: str
) -> None:
    class Narrow(Tallies):
        output = pa.schema([("n", pa.int64())])

        def process(self, rows: Rows, state: State) -> pa.Table:
            return super().process(rows, state).select(["n"])

    JdbcRun(place, sink).step(batch(1))
    JdbcRun(place, sink, stream=replace(STREAM, operators=[Narrow(name=SINK)])).step(batch(2))
    assert rows_in(url) == inputs([1, 2]) and rows_in(url, f"SELECT count(*) FROM {TABLE} WHERE k IS NULL") == [10]
