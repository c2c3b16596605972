"""Spark bounds the bytes of what it hands to Python only where rows may be wide."""

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from siltstone.spark.batches import BOUNDED, BYTES, UNBOUNDED, choose_batches
from siltstone.spark.step import own_session


@pytest.fixture
def query(spark: SparkSession) -> SparkSession:
    """A session of a query's own."""
    session = own_session(spark)
    session.conf.unset(BYTES)
    return session


def chosen(rows: DataFrame, *others: T.StructType) -> str | None:
    choose_batches(rows, others)
    return rows.sparkSession.conf.get(BYTES, None)


@pytest.mark.parametrize(
    "wide",
    ["binary(cast(id as string)) as raw", "array(id) as ids", "map(id, id) as ids", "struct(array(id) as n) as s"],
)
def test_only_narrow_rows_are_not_measured(query: SparkSession, wide: str) -> None:
    rows = query.range(3)
    assert chosen(rows.selectExpr("*", wide)) == BOUNDED
    query.conf.unset(BYTES)
    assert chosen(rows.selectExpr("*", "cast(id as string) as text", "date(now()) as day", "1.5 as x")) == UNBOUNDED


def test_structs_of_several_inputs_are_narrow(query: SparkSession) -> None:
    assert (
        chosen(query.range(3).selectExpr("struct(id, now() as at) as bids", "struct(id = 1 as is_one) as people"))
        == UNBOUNDED
    )


def test_what_operators_hand_on_counts(query: SparkSession) -> None:
    lists = T.StructType([T.StructField("top", T.ArrayType(T.LongType()))])
    assert chosen(query.range(3), lists) == BOUNDED


def test_a_bound_of_the_users_stays(query: SparkSession) -> None:
    query.conf.set(BYTES, "1000000")
    assert chosen(query.range(3)) == "1000000"


def test_python_in_the_source_stays_bounded(query: SparkSession) -> None:
    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    assert chosen(query.range(3).mapInArrow(same, "id long")) == BOUNDED
    query.conf.unset(BYTES)
    assert chosen(query.range(3).mapInPandas(same, "id long").where("id > 1")) == BOUNDED
    query.conf.unset(BYTES)
    query.udf.register("again", lambda n: n, "long")
    assert chosen(query.range(3).selectExpr("again(id) as id")) == BOUNDED


def test_it_is_decided_once(query: SparkSession) -> None:
    assert chosen(query.range(3)) == UNBOUNDED
    assert chosen(query.range(3).selectExpr("array(id) as ids")) == UNBOUNDED
