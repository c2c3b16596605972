"""Edits of every kind of variable as Spark applies them: each row to the subtasks that it concerns."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import siltstone as st
from siltstone.errors import UsageError
from siltstone.settings import Settings
from siltstone.spark.operations import EditResult, RunRequest, edit, run, verify
from siltstone.spark.operations.edit_rows import Change, Expressions
from siltstone.stream import Stream
from tests.spark_streams import read_files, write_files


class Kinds(st.Operator):
    """A list, an object per key group and a broadcast table."""

    name = "kinds"
    key = pa.schema([("key", pa.int64())])
    reads = {"rows": {"key": "key"}}  # noqa: RUF012  (a declaration, which nobody changes)
    items = st.ListState({"amount": pa.int64()})
    seen = st.OpaqueState(int, serialize=lambda n: n.to_bytes(8, "big"), deserialize=lambda b: int.from_bytes(b, "big"))
    rates = st.BroadcastState("rates", {"of": pa.int64()}, {"rate": pa.int64(), "by": pa.int64()}, by="by")

    def process(self, rows: st.Rows, state: st.State) -> None:
        state.items.append(rows.keys, rows.key_index, rows.of("rows").table)
        for group in {int(group) for group in rows.key_groups}:
            state.seen[group] += 1


ROWS = pa.table({"key": pa.array(range(40)), "amount": pa.array(range(40))})
RATES = pa.table({"of": pa.array([1, 2]), "rate": pa.array([10, 20]), "by": pa.array([0, 0])})


@dataclass
class Place:
    """A stream that has taken its first step, at parallelism 3, and its settings."""

    settings: Settings
    stream: Stream

    def edit(self, variable: str, rows: DataFrame | Change) -> EditResult:
        return edit(self.settings, self.stream, "kinds", variable, rows)

    def step(self, parallelism: int = 3) -> None:
        run(self.settings.model_copy(update={"parallelism": parallelism}), self.stream, RunRequest(batches=1))

    def check(self) -> None:
        assert not verify(self.settings, "kinds", every=True).failed

    def rows(self, variable: str) -> list[dict[str, Any]]:
        table = st.open(self.settings.warehouse).stream("kinds").table("kinds", variable).to_table()
        return table.sort_by([(name, "ascending") for name in table.column_names]).to_pylist()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    def source(name: str, *tables: pa.Table) -> Any:
        write_files(tmp_path / name, tables)
        return lambda spark, _: read_files(spark, tmp_path / name, tables[0].schema)

    sources = {"rows": source("rows", ROWS, ROWS, ROWS), "rates": source("rates", RATES)}
    stream = Stream("kinds", sources=sources, operators=[Kinds()], max_parallelism=16)
    made = Place(Settings(warehouse=str(tmp_path / "w"), parallelism=3), stream)
    made.step()
    return made


def test_an_opaque_variable_goes_by_its_key_groups(spark: SparkSession, place: Place) -> None:
    before = {row["key_group"]: row["value"] for row in place.rows("seen")}
    frame = spark.createDataFrame(
        [(group, bytearray((100 + group).to_bytes(8, "big")), False) for group in range(15)] + [(15, None, True)],
        "key_group int, value binary, __deleted boolean",
    )
    done = place.edit("seen", frame)
    assert (done.upserts, done.inserts, done.proven) == (15, 15 - len(before.keys() - {15}), True)
    after = {row["key_group"]: int.from_bytes(row["value"], "big") for row in place.rows("seen")}
    assert after == {group: 100 + group for group in range(15)} | ({15: 0} if 15 in before else {})
    with pytest.raises(UsageError, match="has key group 16: use those of the stream, 0 to 15"):
        place.edit("seen", spark.createDataFrame([(16, bytearray(8))], "key_group int, value binary"))

    def more(rows: DataFrame) -> DataFrame:
        return rows.where("key_group < 3").withColumn("value", F.expr("unhex('0000000000000007')"))

    done = place.edit("seen", more)
    assert (done.upserts, done.proven) == (3, True) and "more" in done.source
    assert [row["value"][-1] for row in place.rows("seen")][:4] == [7, 7, 7, 103]
    place.step()
    assert place.rows("seen")[0]["value"][-1] in (7, 8)
    place.check()


def test_a_broadcast_table_goes_to_every_subtask(spark: SparkSession, place: Place) -> None:
    frame = spark.createDataFrame(
        [(1, 11, 0, False), (2, None, None, True), (3, 30, 1, False)], "of int, rate int, by int, __deleted boolean"
    )
    done = place.edit("rates", frame)
    assert (done.upserts, done.inserts, done.deletes, done.absent, done.proven) == (2, 1, 1, 0, True)
    assert place.rows("rates") == [{"of": 1, "rate": 11, "by": 0}, {"of": 3, "rate": 30, "by": 1}]
    place.step(parallelism=5)
    place.check()


def test_a_list_is_edited_from_what_a_run_has_made_of_it_meanwhile(spark: SparkSession, place: Place) -> None:
    """The function's first answer is of a checkpoint that a run has gone on from; it is asked again."""
    seen = []

    def doubles(rows: DataFrame) -> DataFrame:
        seen.append(rows.count())
        if len(seen) == 1:
            place.step()
        return rows.withColumn("amount", F.expr("2 * amount"))

    done = place.edit("items", doubles)
    assert seen == [40, 80] and (done.upserts, done.inserts, done.proven) == (80, 0, True)
    assert [row["amount"] for row in place.rows("items")] == [2 * (n // 2) for n in range(80)]
    place.step()
    assert len(place.rows("items")) == 120
    place.check()


class Early(st.Operator):
    """Before a deploy that widens a column, and adds a variable."""

    name = "deployed"
    key = pa.schema([("key", pa.int64())])
    totals = st.MapState({"count": pa.int64()}, {"n": pa.int32()})

    def process(self, rows: st.Rows, state: st.State) -> None:
        state.totals.put(rows.keys.with_columns({"count": [2**40] * len(rows.keys), "n": [2**30] * len(rows.keys)}))


class Late(Early):
    totals = st.MapState({"count": pa.int64()}, {"n": pa.int64()})
    items = st.ListState({"amount": pa.int64()})


def test_an_expression_sees_columns_and_variables_as_they_are_declared_now(spark: SparkSession, tmp_path: Path) -> None:
    write_files(tmp_path / "rows", [ROWS])
    settings = Settings(warehouse=str(tmp_path / "w"), parallelism=2)

    def of(operator: st.Operator) -> Place:
        def source(spark: SparkSession, _: object) -> DataFrame:
            return read_files(spark, tmp_path / "rows", ROWS.schema)

        return Place(settings, Stream("kinds", source, [operator], max_parallelism=16))

    run(settings, of(Early()).stream, RunRequest())
    late = of(Late())
    done = edit(settings, late.stream, "deployed", "totals", Expressions({"n": "n * 4"}, "key < 2"))
    assert (done.upserts, done.proven) == (2, True)
    table = st.open(settings.warehouse).stream("kinds").table("deployed", "totals").to_table()
    assert Counter(table["n"].to_pylist()) == {2**32: 2, 2**30: 38}
    with pytest.raises(UsageError, match="has no rows; change what chooses them"):
        edit(settings, of(Late()).stream, "deployed", "items", lambda rows: rows.where("amount > 0"))
    with pytest.raises(UsageError, match="rows are str: give a Path, a DataFrame"):
        edit(settings, late.stream, "deployed", "totals", "rows.parquet")  # pyright: ignore[reportArgumentType]
