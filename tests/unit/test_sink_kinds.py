"""What a stream's sinks are in a warehouse: tables by default, Parquet files where rows are in such files already."""

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import create_engine, text

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import fork
from siltstone.errors import UsageError
from siltstone.format.table_file import table_schema
from siltstone.operator import Rows, State
from siltstone.sinks.delta import DeltaSink, SinkTable
from siltstone.sinks.parquet import ParquetSink
from siltstone.sinks.resolve import check_sinks, resolve_sinks, tables_of
from siltstone.stream import DEAD_LETTERS, Stream
from tests.delta_run import TableRun, rows_in, table_directory
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, Tallies, batch, inputs
from tests.places import place_at

DEFAULT = replace(STREAM, sinks={SINK: None})


class Derived(ParquetSink):
    """A user's own kind of Parquet sink."""


def kind_of(stream: Stream, place: OpenWarehouse) -> Any:
    return resolve_sinks(stream, place)[SINK]


def publish(path: Path) -> None:
    (path / f"checkpoint={1:012d}").mkdir(parents=True)


def begin_before_tables(place: OpenWarehouse) -> None:
    """The catalog is as its upgrade leaves it: it does not say what the stream's default sink is."""
    engine = create_engine(place.catalog.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE stream SET default_sink = NULL"))
    engine.dispose()


def test_the_default_is_a_table_in_the_warehouse(place: OpenWarehouse) -> None:
    for stream in (DEFAULT, replace(STREAM, sinks={SINK: DeltaSink()})):
        assert isinstance(kind_of(stream, place), SinkTable)
    assert tables_of(resolve_sinks(replace(STREAM, sinks={SINK: None, DEAD_LETTERS: print}), place)) == {SINK}
    Outboxed(place, Heard(), stream=DEFAULT).step(batch(1))
    assert isinstance(kind_of(DEFAULT, place), SinkTable), "and after its first run"


def test_a_parquet_sink_or_a_function_stays_what_it_is(place: OpenWarehouse) -> None:
    assert kind_of(STREAM, place) == ParquetSink(place.warehouse.local.sink(NAME) / SINK)
    assert kind_of(replace(STREAM, sinks={SINK: ParquetSink("/out")}), place) == ParquetSink("/out")
    assert kind_of(replace(STREAM, sinks={SINK: print}), place) is print


def test_a_class_derived_from_a_parquet_sink_keeps_its_methods(place: OpenWarehouse) -> None:
    found = kind_of(replace(STREAM, sinks={SINK: Derived()}), place)
    assert isinstance(found, Derived) and found.path == place.warehouse.local.sink(NAME) / SINK


def test_a_stream_of_before_goes_on_with_its_parquet_files(place: OpenWarehouse) -> None:
    """Its rows are never split over two places; a sink that is named changes over, and a fork has rows of its own."""
    Outboxed(place, Heard(), stream=DEFAULT).step(batch(1))
    begin_before_tables(place)
    assert isinstance(kind_of(DEFAULT, place), ParquetSink)
    assert isinstance(kind_of(replace(STREAM, sinks={SINK: DeltaSink()}), place), SinkTable)
    fork(place, NAME, "what-if", "1")
    assert isinstance(kind_of(replace(DEFAULT, name="what-if"), place), SinkTable)


def test_a_stream_that_has_parquet_files_goes_on_with_them_whatever_the_catalog_says(place: OpenWarehouse) -> None:
    """The catalog was rebuilt, or the definition named a ParquetSink until now."""
    Outboxed(place, Heard(), stream=DEFAULT).step(batch(1))
    publish(place.warehouse.local.sink(NAME) / SINK)
    assert isinstance(kind_of(DEFAULT, place), ParquetSink)


def test_a_stream_that_has_a_table_goes_on_with_it_whatever_the_catalog_says(place: OpenWarehouse) -> None:
    """The catalog was rebuilt from the store, which does not say how the stream began."""
    TableRun(place, stream=DEFAULT).step(batch(1))
    begin_before_tables(place)
    assert isinstance(kind_of(DEFAULT, place), SinkTable)


def test_a_warehouse_that_nobody_else_reads_has_files_on_this_machine(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(f"rocksdb://{tmp_path}/w") as place:
        assert kind_of(DEFAULT, place) == ParquetSink(place.warehouse.local.sink(NAME) / SINK)
        with pytest.raises(UsageError, match=r"no other program could read it in rocksdb://.*: give .* a ParquetSink"):
            kind_of(replace(STREAM, sinks={SINK: DeltaSink()}), place)


def test_a_table_is_found_below_a_path_with_any_characters(tmp_path: Path) -> None:
    with place_at(tmp_path / "ä b#c&d 5% +") as place:
        TableRun(place).step(batch(1))
        assert rows_in(place) == inputs([1]) and (table_directory(place) / "_delta_log").is_dir()
    with place_at(tmp_path / "x%41y") as place:
        assert isinstance(kind_of(DEFAULT, place), ParquetSink)
        with pytest.raises(UsageError, match=r"delta-rs reads % in .*x%41y"):
            kind_of(replace(STREAM, sinks={SINK: DeltaSink()}), place)


# Columns that a Delta table does not have


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (pa.uint8(), "declare int16"),
        (pa.uint64(), "declare decimal128"),
        (pa.float16(), "declare float32"),
        (pa.duration("us"), "declare int64, in microseconds"),
        (pa.time64("us"), "declare int64, in microseconds"),
        (pa.timestamp("ns", "UTC"), r'declare timestamp\("us", tz="UTC"\)'),
        (pa.decimal256(40, 2), "declare decimal128"),
        (pa.decimal128(5, -2), "declare decimal128"),
        (pa.dictionary(pa.int32(), pa.string()), "declare string"),
        (pa.binary(4), "declare binary"),
        (pa.null(), "declare the type of its values"),
        (pa.list_(pa.struct([("a", pa.uint8())])), "column a is uint8"),
        (pa.map_(pa.string(), pa.time32("s")), "declare int64"),
    ],
)
def test_a_type_that_a_table_lacks_is_refused_by_name(kind: pa.DataType, instead: str) -> None:
    with pytest.raises(UsageError, match=f"the output of a: column x.*{instead}"):
        table_schema(pa.schema([("x", kind)]), "the output of a")


@pytest.mark.parametrize("names", [["a b"], [""], ["a,b"], ["a", "A"]])
def test_a_name_that_a_table_lacks_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match="rename"):
        table_schema(pa.schema([(name, pa.int64()) for name in names]), "the output of a")


def test_an_output_is_refused_before_the_run_takes_the_stream_over(place: OpenWarehouse) -> None:
    class Unsigned(Tallies):
        output = pa.schema([("k", pa.int64()), ("n", pa.uint32())])

    stream = replace(DEFAULT, operators=[Unsigned(name=SINK)])
    with pytest.raises(UsageError, match="stream tallies: the output of by_key: column n is uint32"):
        check_sinks(stream, resolve_sinks(stream, place))
    assert place.catalog.streams.list() == []


EVERY = pa.schema(
    {
        "flag": pa.bool_(),
        "small": pa.int8(),
        "real": pa.float64(),
        "text": pa.large_string(),
        "data": pa.binary(),
        "day": pa.date32(),
        "at": pa.timestamp("us"),
        "there": pa.timestamp("us", "Europe/Berlin"),
        "sum": pa.decimal128(38, 6),
        "many": pa.large_list(pa.int32()),
        "pair": pa.struct([("a", pa.int16()), ("b", pa.string())]),
        "by_name": pa.map_(pa.string(), pa.float32()),
    }
)
VALUES = pa.table(
    {
        "flag": [True, None],
        "small": [-128, 127],
        "real": [float("inf"), -0.5],
        "text": ["é" * 40, ""],
        "data": [b"\xff", None],
        "day": [date(1, 1, 1), date(9999, 12, 31)],
        "at": [0, -1],
        "there": [1_700_000_000_000_000, None],
        "sum": [Decimal("1.5"), None],
        "many": [[1, None], None],
        "pair": [{"a": 1, "b": None}, None],
        "by_name": [[("x", 1.5)], []],
    },
    schema=EVERY,
)


class Everything(Tallies):
    """Returns two rows with every type that a table has."""

    output = EVERY

    def process(self, rows: Rows, state: State) -> pa.Table:
        return VALUES


def test_every_other_type_arrives_as_it_was(place: OpenWarehouse) -> None:
    TableRun(place, stream=replace(STREAM, operators=[Everything(name=SINK)]), parallelism=1).step(batch(1))
    table = SinkTable(place.warehouse.store, NAME, SINK).open()
    assert table is not None and table.protocol().min_reader_version == 1, "any reader of Delta tables can read it"
    wanted = table_schema(EVERY, "the rows")
    assert table.to_pyarrow_table().cast(wanted).equals(VALUES.cast(wanted))
