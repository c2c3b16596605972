"""The source's columns change between two runs: what operators read may only widen."""

import json
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Max
from siltstone.errors import SchemaConflict
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.sinks.parquet import ParquetSink
from siltstone.spark.operations import RunRequest, edit, replay, rescale, run, stream_runner, verify
from siltstone.stream import Stream
from tests.delta_run import read_sink
from tests.examples import usually
from tests.spark.json_files import json_source
from tests.spark_runs import at, recorded


class Every(Operator):
    """Reads all columns there are."""

    name = "every"
    key = pa.schema({"k": pa.string()})
    seen = ValueState({"columns": pa.string()})

    def process(self, rows: Rows, state: State) -> None:
        names = ",".join(name for name in sorted(rows.table.column_names) if name != "k")
        state.seen.put(rows.keys, {"columns": pa.array([names] * len(rows.count()))})


def source_of(directory: Path, *columns: str) -> Callable[..., DataFrame]:
    """Rows of `k`, and what these expressions make of it and of `v`; `more` adds a file."""
    return json_source(directory, "k string, v int", "k", *columns, at_once=100)


def more(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    number = len(list(directory.iterdir()))
    (directory / f"{number}.json").write_text(json.dumps({"k": "a", "v": number}))


def stream_of(source: Callable[..., DataFrame], *operators: Operator) -> Stream:
    chosen = operators or (Aggregate("tot", {"k": pa.string()}, [Count("n"), Max("most", of="v")]),)
    return Stream("g", source, list(chosen), max_parallelism=8)


def test_a_type_may_widen_and_what_nobody_reads_may_change(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for number, columns in enumerate((["v"], ["cast(v as long) as v", "1 as x"], ["cast(v as long) as v", "'1' as x"])):
        more(directory)
        assert run(settings, stream_of(source_of(directory, *columns)), RunRequest()).checkpoints == [number + 1]
    rescale(settings, stream_of(source_of(directory, "cast(v as long) as v")), 3)  # no rows, so no columns
    stream = stream_of(source_of(directory, "cast(v as long) as v"))
    assert replay(settings, stream).proven and verify(settings, "g", every=True).proven
    with pytest.raises(SchemaConflict, match="was long, and now it is integer"):
        run(settings, stream_of(source_of(directory, "v")), RunRequest())
    more(directory)
    assert run(settings, stream, RunRequest()).checkpoints == [5]


class Copied(Operator):
    """Keeps the newest value of a key, and puts each row out."""

    name = "copied"
    key = pa.schema({"k": pa.string()})
    inputs = ("v",)
    output = pa.schema({"k": pa.string(), "v": pa.int32()})
    latest = ValueState({"v": pa.int32()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        state.latest.put(rows.keys, {"v": rows.max("v")})
        return rows.table.select(["k", "v"])


class CopiedWide(Copied):
    output = pa.schema({"k": pa.string(), "v": pa.int64()})
    latest = ValueState({"v": pa.int64()})


@pytest.mark.parametrize(
    ("kind", "backend"),
    usually(
        product(["delta", "parquet", "function"], ["heap", "rocksdb"]),
        ("delta", "heap"),
        ("parquet", "rocksdb"),
        ("function", "heap"),
    ),
)
def test_input_state_and_output_widen_together(tmp_path: Path, kind: str, backend: str) -> None:
    settings, directory, given = (
        at(tmp_path / "w", backend=backend),
        tmp_path / "in",
        list[tuple[int, str, list[int]]](),
    )

    def keep(rows: DataFrame, id: int) -> None:
        given.append((id, rows.schema["v"].dataType.simpleString(), [row.v for row in rows.collect()]))

    sinks: dict[str, Any] = {"delta": None, "parquet": ParquetSink(tmp_path / "out"), "function": keep}
    for number, (operator, columns) in enumerate(
        ((Copied(), ["v"]), (Copied(), ["v"]), (CopiedWide(), ["shiftleft(cast(v as long), 40) as v"])), 1
    ):
        more(directory)
        stream = Stream(
            "g", source_of(directory, *columns), [operator], sinks={"copied": sinks[kind]}, max_parallelism=8
        )
        assert run(settings, stream, RunRequest()).checkpoints == [number]
    assert verify(settings, "g", every=True).proven and replay(settings, stream, since="2").proven
    expected = [0, 1, 2 << 40]
    if kind == "delta":
        table = read_sink(settings.warehouse, "g", "copied")
        assert table.schema.field("v").type == pa.int64() and sorted(table["v"].to_pylist()) == expected
    elif kind == "parquet":
        paths = sorted((tmp_path / "out").rglob("checkpoint=*/*.parquet"))
        assert [pq.read_table(path, partitioning=None)["v"].to_pylist() for path in paths] == [
            [each] for each in expected
        ]
    else:
        assert given == [(1, "int", [0]), (2, "int", [1]), (3, "bigint", [2 << 40])]


CHANGES = {
    "text": ("v", "cast(v as string) as v", "column v of the source of stream g was integer, and now it is string"),
    "narrower": ("cast(v as long) as v", "v", "was long, and now it is integer"),
    "an instant": (
        "timestamp_ntz'2020-01-01 00:00:00' as v",
        "timestamp'2020-01-01 00:00:00' as v",
        "was timestamp_ntz, and now it is timestamp",
    ),
    "a field": ("struct(v as a, k as b) as v", "struct(v as a) as v", r"was struct<a: integer, b: string>, and now"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_type_is_refused_at_the_start_and_nothing_changes(tmp_path: Path, change: str) -> None:
    before, after, said = CHANGES[change]
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    more(directory)
    run(settings, stream_of(source_of(directory, before), Every()), RunRequest())
    more(directory)
    known = recorded(settings, "g")
    changed = stream_of(source_of(directory, after), Every())
    with pytest.raises(SchemaConflict, match=said):
        run(settings, changed, RunRequest())
    with pytest.raises(SchemaConflict, match=said):
        replay(settings, changed)
    assert recorded(settings, "g") == known


def test_a_collation_is_a_change(tmp_path: Path, spark: SparkSession) -> None:
    if spark.version < "4":
        pytest.skip("before 4.0, Spark has no collations")
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    more(directory)
    run(settings, stream_of(source_of(directory, "k as v"), Every()), RunRequest())
    collated = stream_of(source_of(directory, "collate(k, 'UNICODE_CI') as v"), Every())
    with pytest.raises(SchemaConflict, match=r"was string, and now it is string with the collations icu\.UNICODE_CI"):
        run(settings, collated, RunRequest())


def test_an_operator_that_reads_all_columns_gets_new_ones_but_loses_none(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for columns in (["v"], ["v", "v as w"]):
        more(directory)
        run(settings, stream_of(source_of(directory, *columns), Every()), RunRequest())
    with pytest.raises(SchemaConflict, match="column w of the source of stream g was integer, and now there is none"):
        run(settings, stream_of(source_of(directory, "v"), Every()), RunRequest())


def test_a_query_of_ones_own_is_checked_before_its_first_batch(tmp_path: Path, spark: SparkSession) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"

    def run_own(*columns: str) -> None:
        more(directory)
        source = source_of(directory, *columns)
        with stream_runner(settings, stream_of(source), spark) as runner:
            rows = source(spark, {})
            query = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            runner.await_query(query.trigger(availableNow=True).start())

    run_own("v")
    with pytest.raises(Exception, match="column v of the source of stream g was integer, and now it is string"):
        run_own("cast(v as string) as v")
    run_own("cast(v as long) as v")
    assert recorded(settings, "g")[2] == 2


def test_an_edit_keeps_what_is_recorded(tmp_path: Path, spark: SparkSession) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    more(directory)
    stream = stream_of(source_of(directory, "v"), Every())
    run(settings, stream, RunRequest())
    columns = recorded(settings, "g")[0].definition["columns"]
    assert columns == {"k": {"type": "string"}, "v": {"type": "integer"}}
    edit(settings, stream, "every", "seen", spark.createDataFrame([("b", "x")], "k string, columns string"))
    assert recorded(settings, "g")[0].definition["columns"] == columns
    with pytest.raises(SchemaConflict, match="column v"):
        run(settings, stream_of(source_of(directory, "cast(v as string) as v"), Every()), RunRequest())


def several(directory: Path, *names: str) -> Callable[..., DataFrame]:
    """The rows of several directories, each a source."""
    for name in names:
        more(directory / name)

    def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        frames = [spark.readStream.schema("k string, v int").json((directory / name).as_uri()) for name in names]
        return reduce(DataFrame.union, frames)

    return source


SOURCES = {
    "added": (("a", "b", "c"), r"reads 3 of Spark's sources, and was recorded with 2"),
    "removed": (("a",), r"reads 1 of Spark's sources, and was recorded with 2"),
    "reordered": (("b", "a"), r"another order than they were recorded in \(those at \[1, 2\] have changed places\)"),
}


@pytest.mark.parametrize("change", SOURCES)
def test_sources_added_removed_or_reordered_are_refused_at_the_start(tmp_path: Path, change: str) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    directory.mkdir()
    run(settings, stream_of(several(directory, "a", "b")), RunRequest())
    names, said = SOURCES[change]
    known = recorded(settings, "g")
    with pytest.raises(SchemaConflict, match=said):
        run(settings, stream_of(several(directory, *names)), RunRequest())
    assert recorded(settings, "g") == known
    assert run(settings, stream_of(several(directory, "a", "b")), RunRequest()).checkpoints == [2]
