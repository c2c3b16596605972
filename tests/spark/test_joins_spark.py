"""Joins on Spark leave the state, and make the output, that the same steps do in one process."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.operator import Operator
from siltstone.spark.inputs import columns_read, unite
from siltstone.spark.operations.holding import open_region
from siltstone.spark.step import run_step
from siltstone.testing import StreamTester
from tests.arrow_frames import from_arrow
from tests.join_streams import SCHEMA, Batch, interval_join, joining, less, lookup_join
from tests.spark_runs import at as run_at
from tests.timed_streams import BEGIN, at

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
