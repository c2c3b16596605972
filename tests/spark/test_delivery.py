"""Staged rows as sinks get them: the same whether the driver reads them or Spark's tasks do."""

import datetime as dt
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import siltstone as st
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.errors import CorruptObject, StateError, UsageError
from siltstone.format.output import OutputWriter, open_output, read_output
from siltstone.model import StoredObject
from siltstone.sinks import arrow
from siltstone.sinks.arrow import ArrowSink, open_rows
from siltstone.sinks.parquet import ParquetSink
from siltstone.spark import delivery
from siltstone.spark.delivery import FEW_BYTES, read_few_rows, staged_rows
from siltstone.spark.operations import RunRequest, run
from siltstone.store.base import Store
from siltstone.store.open import open_store
from tests.arrow_frames import from_arrow, to_arrow
from tests.arrow_strategies import TYPES, UNSIGNED, random_array
from tests.spark_runs import at
from tests.spark_streams import LITTLE

ROWS = 300
KINDS = [kind for kind in TYPES if kind not in UNSIGNED]
"""what an operator may put out"""


@pytest.fixture(params=["driver", "tasks"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who reads the rows."""
    if request.param == "tasks":
        monkeypatch.setattr("siltstone.spark.delivery.FEW_BYTES", 0)
    return request.param


@pytest.fixture(params=["UTC", "America/New_York"])
def zone(request: pytest.FixtureRequest, with_settings: Callable[[dict[str, str]], None]) -> str:
    """The session's time zone, which is the user's affair."""
    with_settings({"spark.sql.session.timeZone": request.param})
    return request.param


def _staged(warehouse: Path, table: pa.Table) -> OutputRecord:
    """Stage a table as two objects."""
    store = open_store(f"file://{warehouse}")
    [batch] = table.to_batches()
    objects = ()
    for name, half in (("o", batch.slice(0, ROWS // 2)), ("p", batch.slice(ROWS // 2))):
        writer = OutputWriter(store, lambda n, name=name: f"s/1/{name}.{n}.output.arrow", table.schema, inline_bytes=-1)
        writer.add(half)
        objects += tuple(writer.finish().objects)
    return OutputRecord("o", table.schema.serialize().to_pybytes(), len(table), objects, "s", 1, 1, 1, False, None)


@pytest.mark.smoke
def test_a_sink_gets_the_rows_that_were_staged(spark: SparkSession, tmp_path: Path, reader: str, zone: str) -> None:
    random = Random(1)
    columns = {f"c{i}": random_array(random, kind, ROWS) for i, kind in enumerate(KINDS)}
    columns["nested"] = pa.StructArray.from_arrays(list(columns.values()), names=list(columns))
    columns["listed"] = pa.ListArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), columns["nested"])
    table = pa.table(columns)
    output = _staged(tmp_path, table)
    frame = staged_rows(spark, f"file://{tmp_path}", output)
    assert repr(to_arrow(frame).cast(table.schema).to_pylist()) == repr(table.to_pylist())  # NaN is NaN
    assert [field.nullable for field in frame.schema] == [True] * len(columns)
    assert frame.count() == ROWS


def test_altered_rows_reach_no_sink(spark: SparkSession, tmp_path: Path, reader: str) -> None:
    output = _staged(tmp_path, pa.table({"n": pa.array(range(ROWS))}))
    path = tmp_path / output.objects[1].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match=r"p\.0\.output") as failed:
        staged_rows(spark, f"file://{tmp_path}", output).collect()
    assert isinstance(failed.value, CorruptObject) == (reader == "driver")


def test_a_store_that_answers_wrongly_once_fails_no_delivery(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = _staged(tmp_path, pa.table({"n": pa.array(range(ROWS))}))
    path = tmp_path / output.objects[1].name
    right = path.read_bytes()
    path.write_bytes(right[:-1] + b"x")

    def read(store: Store, stored: StoredObject, schema: bytes) -> Iterator[pa.RecordBatch]:
        try:
            yield from read_output(store, stored, schema)
        except CorruptObject:
            path.write_bytes(right)
            raise

    monkeypatch.setattr(delivery, "read_output", read)
    frame = staged_rows(spark, f"file://{tmp_path}", output)
    assert path.read_bytes() == right
    assert sorted(row.n for row in frame.collect()) == list(range(ROWS))


def test_a_function_that_takes_arrow_gets_the_rows_without_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any type, object by object, also if the store once answers wrongly; no session is there to run a job."""
    columns = {f"c{i}": random_array(Random(1), kind, ROWS) for i, kind in enumerate(KINDS)}
    columns["nested"] = pa.StructArray.from_arrays(list(columns.values()), names=list(columns))
    output, taken = _staged(tmp_path, pa.table(columns)), dict[int, pa.Table]()
    path = tmp_path / output.objects[1].name
    right = path.read_bytes()

    def open_again(store: Store, stored: StoredObject, schema: bytes) -> Iterator[pa.RecordBatch]:
        try:
            return open_output(store, stored, schema)
        except CorruptObject:
            path.write_bytes(right)
            raise

    sink = ArrowSink(lambda rows, checkpoint: taken.update({checkpoint: rows.read_all()}))
    give = delivery.deliverers(cast(Any, None), {"o": sink}, f"file://{tmp_path}")["o"]
    path.write_bytes(right[:-1] + b"x")
    with pytest.raises(CorruptObject, match=r"p\.0\.output"):
        give(output)
    assert not taken
    monkeypatch.setattr(arrow, "open_output", open_again)
    give(output)
    assert repr(taken[output.sink_id].to_pylist()) == repr(pa.table(columns).to_pylist())


def test_a_sink_that_ends_its_process_is_a_sink_that_failed(tmp_path: Path) -> None:
    """A thread of Spark's would end, and the run wait for it for ever."""
    output = _staged(tmp_path, pa.table({"n": pa.array(range(ROWS))}))
    give = delivery.deliverers(cast(Any, None), {"o": ArrowSink(lambda *_: sys.exit(3))}, f"file://{tmp_path}")["o"]
    with pytest.raises(StateError, match="the sink of o failed at checkpoint 1"):
        give(output)


def test_a_function_that_takes_arrow_and_fails_is_told_and_gets_the_rows_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its first run fails at the second checkpoint, two are pending, and the next run begins with it."""
    taken, fails = dict[int, pa.Table](), [True]

    def take(rows: pa.RecordBatchReader, checkpoint: int) -> None:
        if checkpoint == 2 and fails:
            fails.clear()
            raise ValueError("the disk is full")
        assert checkpoint not in taken
        taken[checkpoint] = rows.read_all()

    stream = replace(LITTLE, sinks=dict.fromkeys(LITTLE.sinks) | {"accounts": ArrowSink(take)})
    settings = at(tmp_path / "w", max_pending=2)
    with pytest.raises(StateError, match=r"the sink of accounts failed at checkpoint 2: .*the disk is full"):
        run(settings, stream, RunRequest())
    run(settings, stream, RunRequest())
    reference = replace(LITTLE, sinks={"accounts": None})
    run(at(tmp_path / "delta"), reference, RunRequest())
    table = st.open(tmp_path / "delta").stream("little").sink_table("accounts")
    rows = sorted(str(row) for each in taken.values() for row in each.to_pylist())
    assert rows == sorted(str(row) for row in table.to_pyarrow_table().to_pylist()) and list(taken) == sorted(taken)


@pytest.mark.usefixtures("spark")
def test_a_sink_whose_dataframe_cannot_have_a_column_is_refused_before_a_step(tmp_path: Path) -> None:
    """Spark has no such duration; what a function takes as Arrow, it never sees."""
    taken = list[pa.Table]()
    stream = replace(LITTLE, operators=[Waits()], sinks={"waits": lambda rows, _: taken.append(to_arrow(rows))})
    for _ in range(2):
        with pytest.raises(UsageError, match=r"the sink of waits gets its rows as a DataFrame, .* duration\[s\]"):
            run(at(tmp_path / "w"), stream, RunRequest())
    assert not taken and not st.open(tmp_path / "w").stream("little").checkpoints().checkpoints
    sink = ArrowSink(lambda rows, _: taken.append(rows.read_all()))
    run(at(tmp_path / "w"), replace(stream, sinks={"waits": sink}), RunRequest())
    assert pa.concat_tables(taken).schema.field("wait").type == pa.duration("s")


class Waits(st.Operator):
    """Returns a duration per account."""

    name = "waits"
    key = pa.schema({"account": pa.string()})
    output = pa.schema({"account": pa.string(), "wait": pa.duration("s")})

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        return rows.keys.with_columns({"wait": pa.array([60] * len(rows.keys), pa.duration("s"))})


def test_an_object_of_rows_that_compress_well_is_not_decoded_at_once(tmp_path: Path) -> None:
    store, schema = open_store(f"file://{tmp_path}"), pa.schema({"text": pa.string()})
    writer = OutputWriter(store, lambda n: f"s/1/o.{n}.output.arrow", schema, inline_bytes=-1)
    batch = pa.record_batch([pa.array(["a" * 1000] * 1000)], schema=schema)
    for _ in range(50):
        writer.add(batch)
    (stored,) = writer.finish().objects
    output = OutputRecord("o", schema.serialize().to_pybytes(), 50_000, (stored,), "s", 1, 1, 1, False, None)
    before = pa.total_allocated_bytes()
    rows = open_rows(store, output)
    assert rows.read_next_batch().equals(batch)
    assert pa.total_allocated_bytes() - before < 5 * batch.nbytes
    assert sum(each.num_rows for each in rows) == 49_000


def test_rows_that_compress_well_are_many(spark: SparkSession, tmp_path: Path) -> None:
    output = _staged(tmp_path, pa.table({"text": ["a" * 20_000] * ROWS}))
    assert sum(stored.bytes for stored in output.objects) < FEW_BYTES < 20_000 * ROWS
    assert read_few_rows(open_store(f"file://{tmp_path}"), output) is None
    assert staged_rows(spark, f"file://{tmp_path}", output).count() == ROWS


def test_times_of_any_year_reach_a_parquet_sink(spark: SparkSession, tmp_path: Path) -> None:
    """Before 4.0 Spark refuses those before 1900, unless it is told which calendar they are of."""
    times = [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(1582, 10, 10, 12, tzinfo=dt.UTC)]
    table = pa.table({"day": pa.array([t.date() for t in times]), "at": pa.array(times, pa.timestamp("us", "UTC"))})
    sink = ParquetSink(tmp_path / "sink")
    sink.deliver(from_arrow(spark, table), 1)
    assert pq.read_table(sink.published_path(1)).cast(table.schema).equals(table)
    back = spark.read.schema("day date, at timestamp").parquet(str(sink.published_path(1)))
    assert to_arrow(back).cast(table.schema).equals(table)
