"""Spark bounds the bytes of what Python gets, but for narrow rows of a query without Python of the user's own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import siltstone as st
from siltstone.aggregates.operator import Aggregate, Count
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark import step
from siltstone.spark.batches import BYTES, NARROW_BYTES, ROWS, UNBOUNDED, rows_a_batch
from siltstone.spark.operations import open_region
from siltstone.spark.runner import StreamRunner
from siltstone.spark.step import StepRun
from siltstone.spark.versions import has_setting
from siltstone.stream import Stream
from tests.spark_runs import at, state

A_BATCH = 5000


class Widths(st.Operator):
    """Counts rows, and reads a text of theirs."""

    name, key, inputs = "fifths", {"fifth": pa.int64()}, ("text",)
    totals = st.ValueState({"n": pa.int64()})

    def process(self, rows: st.Rows, state: st.State) -> None:
        state.totals.put(rows.keys, {"n": rows.count(initial=state.totals.get(rows.keys)["n"])})


def settings_of(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    source: Callable[[DataFrame], DataFrame],
    *,
    steps: int = 4,
    interval: int = 1,
    before: Callable[[DataFrame], DataFrame] = lambda rows: rows,
    operator: st.Operator | None = None,
) -> list[tuple[str | None, str | None]]:
    """Run a query; return the settings of its session in each step."""
    found, given = list[tuple[str | None, str | None]](), before_of(spark)
    settings = at(path, checkpoint_steps=interval)
    with OpenWarehouse.open_writable(settings.warehouse) as place:
        stream = Stream("own", source=lambda *_: None, operators=[operator or Widths()])
        runner = StreamRunner(spark, open_region(settings, stream, place, {}, 2), max_steps=steps)

        def batch(rows: DataFrame, id: int) -> None:
            runner(before(rows), id)
            assert before_of(rows.sparkSession) == given, "only steps have others"

        def run_step(own: SparkSession, rows: DataFrame | None, *arguments: Any) -> StepRun:
            if rows is not None:
                found.append(before_of(rows.sparkSession))
            return step.run_step(own, rows, *arguments)

        monkeypatch.setattr("siltstone.spark.runner.run_step", run_step)

        ticks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", A_BATCH).load()
        rows = source(ticks.selectExpr("value", "value % 5 as fifth"))
        query = rows.writeStream.foreachBatch(batch).option("checkpointLocation", runner.checkpoint_location).start()
        runner.await_query(query)
        runner.finish()
        runner.close()
    counted = state(settings, "own", "fifths", "totals", path / "out")
    assert counted.column("n").to_pylist() == [steps * A_BATCH // 5] * 5
    assert before_of(spark) == given, "the user's session stays"
    return found[:steps]


def lifted(spark: SparkSession) -> tuple[str | None, str | None]:
    return (UNBOUNDED, "8192") if has_setting(spark, BYTES) else before_of(spark)


def before_of(spark: SparkSession) -> tuple[str | None, str | None]:
    return spark.conf.get(BYTES, None), spark.conf.get(ROWS, None)


def text_of(length: str) -> Callable[[DataFrame], DataFrame]:
    return lambda rows: rows.selectExpr("fifth", f"repeat('x', int({length})) as text")


@pytest.mark.parametrize("sql", ["repeat('x', 10)", "explode(array('x'))"])
def test_narrow_rows_are_not_measured_once_a_checkpoint_is_complete(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sql: str
) -> None:
    """Whether Spark's own functions make one row of each or several."""
    given, few = before_of(spark), lifted(spark)
    found = settings_of(
        spark, monkeypatch, tmp_path, lambda rows: rows.selectExpr("fifth", f"{sql} as text"), interval=2
    )
    assert found == [given, given, few, few]


def test_rows_that_become_wide_are_measured_again(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given, few = before_of(spark), lifted(spark)
    wide = f"case when value < {3 * A_BATCH} then 10 else {2 * NARROW_BYTES} end"
    assert settings_of(spark, monkeypatch, tmp_path, text_of(wide), steps=5) == [given, few, few, few, given]


def in_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch([batch.column(0), pa.array(["x"] * len(batch))], ["fifth", "text"])


def texts(numbers: pd.Series) -> pd.Series:
    return numbers.astype(str)


def text(number: int) -> str:
    return str(number)


class Texts:
    """A table function in Python."""

    def eval(self, number: int) -> Iterator[tuple[str]]:
        yield (text(number),)


def udtf(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    spark.udtf.register("texts_of", F.udtf(Texts, returnType="text string"))
    rows.createOrReplaceTempView("fifths")
    return spark.sql("select fifth, text from fifths, lateral texts_of(fifth)")


OF_THE_USER = {
    "mapInArrow": lambda rows: rows.select("fifth").mapInArrow(in_arrow, "fifth long, text string"),
    "pandas_udf": lambda rows: rows.select("fifth", F.pandas_udf(texts, "string")("fifth").alias("text")),
    "udf": lambda rows: rows.select("fifth", F.udf(text, "string")("fifth").alias("text")),
    "udtf": udtf,
}


@pytest.mark.parametrize("way", OF_THE_USER)
@pytest.mark.parametrize("where", ["source", "before"])
def test_python_of_the_users_keeps_its_batches(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, where: str
) -> None:
    given, same = before_of(spark), {"source": lambda rows: rows, "before": lambda rows: rows}
    found = settings_of(spark, monkeypatch, tmp_path, **(same | {where: OF_THE_USER[way]}), steps=3)
    assert found == [given] * 3


def test_combined_rows_are_measured(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = before_of(spark)
    operator = Aggregate("fifths", {"fifth": pa.int64()}, [Count("n")], map_side=True)
    assert settings_of(spark, monkeypatch, tmp_path, lambda rows: rows, steps=3, operator=operator) == [given] * 3


def test_a_batch_has_four_mebibytes() -> None:
    assert [rows_a_batch(width) for width in (1, 512, 513, 1024, NARROW_BYTES)] == [8192, 8192, 8176, 4096, 2048]


def test_a_bound_of_rows_that_is_lower_stays() -> None:
    assert [rows_a_batch(100, given) for given in ("100", "0", "131072", None)] == [100, 8192, 8192, 8192]
