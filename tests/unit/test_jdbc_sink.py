"""How a JdbcSink is declared, what it refuses, and that no password is shown."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import SiltstoneError, StateError, Unreachable, UsageError
from siltstone.pipes.metadata import sink_metadata
from siltstone.secret import Secret
from siltstone.sinks import jdbc
from siltstone.sinks.jdbc import JdbcSink, JdbcTable, open_url
from siltstone.sinks.jdbc_columns import to_rows
from siltstone.sinks.resolve import check_sinks, resolve_sinks
from siltstone.spark.delivery import deliverers
from siltstone.stream import Stream
from tests.jdbc_run import TABLE, begin_stream, rows_in, stage
from tests.outbox_run import NAME, SINK, STREAM

PLANTED = "pl4nted"
AWAY = "postgresql://app@127.0.0.1:1/sales"
"""nothing listens there"""


def stream_with(sink: JdbcSink) -> Stream:
    return replace(STREAM, sinks={SINK: sink})


def test_a_definition_gets_its_table_and_delivery_goes_to_it(place: OpenWarehouse, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sales.db"
    sinks = resolve_sinks(stream_with(JdbcSink(url, TABLE)), place)
    table: Any = sinks[SINK]
    assert isinstance(table, JdbcTable)
    check_sinks(STREAM, sinks)
    assert not (tmp_path / "sales.db").exists(), "a check makes nothing"
    begin_stream(place)
    give = deliverers(None, sinks, place.warehouse.store_url)[SINK]  # pyright: ignore[reportArgumentType]
    give(stage(place, pa.table({"n": [1]})))
    assert rows_in(url) == [1] and (tmp_path / "sales.db").stat().st_mode & 0o077 == 0
    assert sink_metadata([1, 3], table) == {
        "first_checkpoint": 1,
        "last_checkpoint": 3,
        "dagster/uri": url,
        "dagster/table_name": TABLE,
    }


def test_a_fork_does_not_write_to_the_table_of_its_parent() -> None:
    with pytest.raises(UsageError, match="would write to its sink of by_key"):
        stream_with(JdbcSink(AWAY, TABLE)).as_fork("what-if", NAME)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://app@db/sales",
        "jdbc:postgresql://db/sales",
        "sqlite://",
        f"postgresql://app:{PLANTED}@x@db/sales",
        "sales",
    ],
)
def test_a_url_of_another_kind_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UsageError, match=r"use postgresql://USER@HOST/DATABASE or sqlite:///PATH$") as caught:
        JdbcSink(url, TABLE)
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize("table", ["", "a.", ".a", "a.b.c"])
def test_a_name_that_is_no_table_s_is_refused(table: str) -> None:
    with pytest.raises(UsageError, match=r"use NAME or SCHEMA\.NAME"):
        JdbcSink(AWAY, table)


@pytest.mark.parametrize("table", ["siltstone_sinks", "public.Siltstone_Sinks"])
def test_the_table_of_the_ids_is_not_one_for_rows(table: str) -> None:
    with pytest.raises(UsageError, match="keeps its ids in the table siltstone_sinks: name another for the rows"):
        JdbcSink("sqlite:///sales.db", table)


def test_a_file_that_there_cannot_be_is_refused_before_the_run(place: OpenWarehouse, tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "sales.db", tmp_path):
        sinks = resolve_sinks(stream_with(JdbcSink(f"sqlite:///{path}", TABLE)), place)
        with pytest.raises(UsageError, match="name one in a directory that exists"):
            check_sinks(STREAM, sinks)
    assert place.catalog.streams.list() == []


def test_names_that_postgresql_would_cut_are_refused_before_the_run(place: OpenWarehouse) -> None:
    long = "ü" * 32
    with pytest.raises(UsageError, match=f"the name {long} is longer than 63 bytes"):
        JdbcTable(JdbcSink(AWAY, f"public.{long}"), place, NAME, SINK).check(pa.schema({"n": pa.int64()}))
    with pytest.raises(UsageError, match=f"the output of by_key: column {long} is longer than 63 bytes"):
        JdbcTable(JdbcSink(AWAY, TABLE), place, NAME, SINK).check(pa.schema({long: pa.int64()}))


def test_a_date_that_python_does_not_have_is_told_by_its_column() -> None:
    batch = pa.record_batch({"n": pa.array([1]), "at": pa.array([4_000_000], pa.date32())})
    with pytest.raises(StateError, match=r"^it: column at has a date or time outside the years 1 to 9999"):
        to_rows(batch, "it", sqlite=True)


def test_columns_that_differ_in_case_alone_are_refused(place: OpenWarehouse, tmp_path: Path) -> None:
    table = JdbcTable(JdbcSink(f"sqlite:///{tmp_path}/sales.db", TABLE), place, NAME, SINK)
    with pytest.raises(UsageError, match="columns n and N differ in case alone"):
        table.check(pa.schema([("n", pa.int64()), ("N", pa.int64())]))


# Secrets


@pytest.mark.parametrize("kind", ["in the URL", "the URL is one", "beside the URL"])
def test_a_password_is_shown_nowhere(
    place: OpenWarehouse, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jdbc, "OUTAGE_S", 0.2)
    monkeypatch.setenv("SALES_PASSWORD", PLANTED)
    whole = AWAY.replace("app@", f"app:{PLANTED}@")
    monkeypatch.setenv("SALES_URL", whole)
    sink = {
        "in the URL": JdbcSink(whole, TABLE),
        "the URL is one": JdbcSink(Secret("SALES_URL"), TABLE),
        "beside the URL": JdbcSink(AWAY, TABLE, password=Secret("SALES_PASSWORD")),
    }[kind]
    assert open_url(sink).password == PLANTED
    stream = stream_with(sink)
    table: Any = resolve_sinks(stream, place)[SINK]
    with caplog.at_level(logging.DEBUG), pytest.raises(Unreachable) as caught:
        table.check(pa.schema({"n": pa.int64()}))
    errors: list[BaseException] = [caught.value]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None:
        errors.append(cause)
    told = [repr(stream), str(stream.definition()), table.label, str(sink_metadata([1], table)), *caplog.messages]
    assert "table tallied in postgresql://app" in caught.value.full_text and "trying again" in caplog.text
    for text in [*told, *(f"{error} {error!r}" for error in errors)]:
        assert PLANTED not in text


def test_a_secret_that_is_missing_is_named(place: OpenWarehouse) -> None:
    for sink in (JdbcSink(Secret("SALES"), TABLE), JdbcSink(AWAY, TABLE, password=Secret("SALES"))):
        table: Any = resolve_sinks(stream_with(sink), place)[SINK]
        with pytest.raises(SiltstoneError, match="a secret is missing: set SALES"):
            table.check(pa.schema({"n": pa.int64()}))
    with pytest.raises(UsageError, match="SQLite has no password"):
        open_url(JdbcSink("sqlite:///sales.db", TABLE, password=Secret("SALES")))
