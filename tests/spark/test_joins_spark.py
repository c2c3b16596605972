"""Joins on Spark leave the state, and make the output, that the same steps do in one process."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.joins.interval import IntervalJoin
from siltstone.operator import Operator
from siltstone.spark.inputs import columns_read, unite
from siltstone.spark.operations import RunRequest, run
from siltstone.spark.operations.holding import open_region
from siltstone.spark.step import run_step
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from tests.arrow_frames import from_arrow
from tests.examples import is_thorough
from tests.join_streams import SCHEMA, Batch, interval_join, joining, less, lookup_join
from tests.spark_runs import at as run_at
from tests.spark_streams import read_files, write_files
from tests.timed_streams import BEGIN, at

pc: Any = pyarrow.compute
TYPES = {name: pa.schema(columns) for name, columns in SCHEMA.items()}
STEPS = [
    Batch([(n % 5, at(n % 7), at(n % 11), n % 4) for n in range(40)], [(n % 6, at(n % 8), n % 5) for n in range(40)]),
    Batch([], [(n % 6, at(9 + n % 8), None) for n in range(20)]),
    Batch([(n % 5, at(12), None, None) for n in range(6)], [(n % 6, at(16), 3) for n in range(6)]),
    Batch([(1, at(40), at(50), 1)], [(1, at(41), 2)]),
    Batch([], []),
]


@pytest.mark.parametrize(
    "operator",
    [interval_join("full", (-3, 3), less), interval_join("semi", (0, "until")), lookup_join()],
    ids=["full", "semi", "lookup"],
)
def test_spark_leaves_the_state_that_one_process_leaves(
    spark: SparkSession, tmp_path: Path, operator: Operator
) -> None:
    stream = joining(operator, sinks={})
    with ExitStack() as stack:
        place = stack.enter_context(OpenWarehouse.open_writable(str(tmp_path / "w")))
        region = open_region(run_at(tmp_path / "w", parallelism=3), stream, place, {}, 3)
        tester = stack.enter_context(StreamTester(stream, parallelism=2, schema=SCHEMA, now=BEGIN))
        for batch in STEPS:
            rows: dict[str, Any] = batch.rows()
            frames = {
                name: from_arrow(spark, pa.Table.from_pylist(rows.get(name, []), of)) for name, of in TYPES.items()
            }
            times = stream.row_times(operator)
            read = {name: columns_read(frame, operator, times.get(name), name) for name, frame in frames.items()}
            done = run_step(spark, unite(frames, read) if rows else None, region.begin_step(ends=True))
            done.unpersist()
            for name, received in done.received.items():
                region.acknowledge(name, received)
            made = tester.step(rows or None)["joined"]
            region.complete()
            assert region.digest == tester.digest
            assert sum(a.rows_out for a in done.received["joined"]) == made.num_rows


WITHIN = timedelta(seconds=-5), timedelta(seconds=20)
SPARKS = {"full": "full_outer"}
"""how -> what Spark calls it; it has no anti join of two streams"""
if is_thorough():  # a full join has the rows of an inner, a left and a right one
    SPARKS |= {"inner": "inner", "left": "left_outer", "right": "right_outer", "semi": "left_semi"}
LEFT = pa.schema({"id": pa.int64(), "at": pa.timestamp("us", "UTC"), "a": pa.int64()})
RIGHT = pa.schema({"k": pa.int64(), "seen": pa.timestamp("us", "UTC"), "b": pa.int64()})


def disordered(schema: pa.Schema, seed: int) -> list[pa.Table]:
    """Files of rows of few keys, at most ten seconds out of order, and at last two far ahead, which have no partner."""
    random, files = np.random.default_rng(seed), list[pa.Table]()
    for number in range(5):
        seconds = number * 30 + random.integers(0, 30, 40)
        late = random.integers(0, 10, 40) * (random.random(40) < 0.3)
        rows = random.integers(0, 12, 40), [BEGIN + timedelta(seconds=int(s)) for s in seconds - late], np.arange(40)
        files.append(pa.table(list(rows), schema=schema))
    for hours in (1, 2):
        files.append(pa.table([[-seed], [BEGIN + timedelta(hours=hours)], [0]], schema=schema))
    return files


def rows_beside(spark: SparkSession, sides: Mapping[str, Path], how: str, checkpoint: Path) -> Counter[tuple[Any, ...]]:
    """What Spark's own join of the two streams returns."""
    left = read_files(spark, sides["asks"], LEFT).withWatermark("at", "10 seconds")
    right = read_files(spark, sides["bids"], RIGHT).withWatermark("seen", "10 seconds")
    condition = "id = k and seen between at - interval 5 seconds and at + interval 20 seconds and a <= b + 20"
    joined, found = left.join(right, F.expr(condition), SPARKS[how]), Counter[tuple[Any, ...]]()
    own = [*LEFT.names] if how == "semi" else [*LEFT.names, *RIGHT.names]
    if how != "semi":
        joined = joined.withColumn("id", F.coalesce("id", "k"))
    shown = joined.select(*(name for name in own if name != "k"))
    query = shown.writeStream.foreachBatch(lambda rows, _: found.update(map(tuple, rows.collect())))
    query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()
    return found


def test_each_kind_of_join_returns_the_rows_that_spark_returns(spark: SparkSession, tmp_path: Path) -> None:
    sides, found = {"asks": tmp_path / "asks", "bids": tmp_path / "bids"}, dict[str, Counter[tuple[Any, ...]]]()
    for (name, directory), schema in zip(sides.items(), (LEFT, RIGHT), strict=True):
        write_files(directory, disordered(schema, seed=1 + list(sides).index(name)))

    def collects(how: str) -> Callable[[DataFrame, int], None]:
        counts = found.setdefault(how, Counter())
        return lambda rows, _: counts.update(map(tuple, rows.collect()))

    columns = {"asks": {"a": pa.int64()}, "bids": {"b": pa.int64()}}
    joins = [
        IntervalJoin(
            how,
            key={"id": pa.int64()},
            reads={"asks": {"id": "id"}, "bids": {"k": "id"}},
            on={"asks": "at", "bids": "seen"},
            columns=columns,
            between=WITHIN,
            how=how,
            where=lambda pairs: pc.less_equal(pairs["a"], pc.add(pairs["b"], 20)),
        )
        for how in SPARKS
    ]
    stream = Stream(
        "beside",
        sources={
            "asks": lambda spark, _: read_files(spark, sides["asks"], LEFT),
            "bids": lambda spark, _: read_files(spark, sides["bids"], RIGHT),
        },
        event_time={"asks": EventTime("at", delay="10 s"), "bids": EventTime("seen", delay="10 s")},
        operators=joins,
        sinks={how: collects(how) for how in SPARKS},
    )
    run(run_at(tmp_path / "w", parallelism=2), stream, RunRequest())
    for how in SPARKS:
        beside = rows_beside(spark, sides, how, tmp_path / f"spark-{how}")
        assert found[how] == beside and sum(beside.values()) > 100, how
