"""Tables of SQLite and PostgreSQL as sinks: types and their values, and which tables can take an output."""

from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sqlalchemy import MetaData, Table, select

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, UsageError
from siltstone.operator import Rows, State
from siltstone.sinks.jdbc import MARKERS, JdbcSink, JdbcTable
from tests.jdbc_run import TABLE, JdbcRun, connected, is_postgres, place, rows_in, run_sql, sink, stage, url, written_by
from tests.outbox_run import NAME, SINK, STREAM, Tallies, batch, inputs

MARKED = f"SELECT id FROM {MARKERS}"
__all__ = ["place", "sink", "url"]  # the fixtures


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
    (pa.binary(), [b"", bytes(range(256))]),
    (pa.large_binary(), [b"", b'",']),
    (pa.binary(3), [b"abc", b"\0\0\0"]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.time64("us"), [time(0, 0), time(23, 59, 59, 999999)]),
    (pa.timestamp("us"), [datetime(1970, 1, 1), datetime(2026, 3, 29, 2, 30, 0, 1)]),
    (pa.timestamp("ms"), [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999000)]),
    (pa.timestamp("us", "UTC"), [datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 3, 29, 2, 30, 0, 1, UTC)]),
    (pa.timestamp("s", "Asia/Tokyo"), [datetime(1950, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]),
]


# pyarrow 21 cannot tell how large such a column is, so that no output can have one.
if int(pa.__version__.partition(".")[0]) > 21:
    VALUES += [(pa.string_view(), ["\\.", "\r\n,;\t"]), (pa.binary_view(), [b"\\x00", b"\n"])]


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
    tried, deliver = list[int](), JdbcTable._deliver  # noqa: SLF001 - to count attempts

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
