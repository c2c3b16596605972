"""`Aggregate` equals the aggregation of Spark's own streaming queries, with and without its map side."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from siltstone.aggregates.lists import CollectList, TopN
from siltstone.aggregates.operator import Aggregate, Average, Count, First, Last, Max, Min, Sum
from siltstone.spark.operations import RunRequest, restore, run
from siltstone.stream import Stream
from tests.arrow_frames import to_arrow
from tests.spark_runs import at
from tests.spark_streams import read_files, source_of


def test_spark_aggregates_the_same(spark: SparkSession, tmp_path: Path) -> None:
    """`Aggregate` with and without the map side, and Spark's own streaming state, over the same files.

    Keys are floats with NaNs of several kinds and zeros of both signs: one key each. Null is one, too.
    """
    tables = [_measurements(seed) for seed in range(3)]
    functions = [
        Count("n"),
        Count("n_v", of="v"),
        Sum("total", of="v"),
        Average("mean", of="v"),
        Min("lo", of="s", type=pa.string()),
        Max("hi", of="x", type=pa.float64()),
        First("first", of="v", by="t", by_type=pa.int64()),
        Last("last", of="v", by="t", by_type=pa.int64()),
        CollectList("all", of="x", type=pa.float64()),
        CollectList("some", of="s", type=pa.string(), distinct=True),
        TopN("top", 3, by="v", of={"s": pa.string()}),
    ]
    key = {"k": pa.float64(), "day": pa.date32()}
    operators = [
        Aggregate(name, key, functions, output=False, map_side=name == "mapped") for name in ("plain", "mapped")
    ]
    stream = Stream("measurements", source_of(tables), operators, max_parallelism=8)
    settings = at(tmp_path / "w")
    run(settings, stream, RunRequest())
    restore(settings, stream.name, to=tmp_path / "out")
    plain, mapped = (pq.read_table(tmp_path / "out" / op.name / "totals") for op in operators)
    order = [("k", "ascending"), ("day", "ascending")]
    assert repr(plain.sort_by(order).to_pylist()) == repr(mapped.sort_by(order).to_pylist())

    files = read_files(spark, tmp_path / "w" / "source" / stream.name, tables[0].schema)
    files.createOrReplaceTempView("measurements")
    aggregated = spark.sql(
        "select k, day, count(*) n, count(v) n_v, sum(v) total, avg(v) mean, min(s) lo, max(x) hi, "
        "min(struct(t, v)) filter (where v is not null).v first, max(struct(t, v)) filter (where v is not null).v last"
        ", sort_array(collect_list(x)) all, sort_array(collect_set(s)) some, "
        "slice(sort_array(collect_list(struct(v, s)) filter (where v is not null), false), 1, 3) top "
        "from measurements group by k, day"
    )
    query = aggregated.writeStream.outputMode("complete").format("memory").queryName("spark_state")
    query.option("checkpointLocation", str(tmp_path / "spark")).trigger(availableNow=True).start().awaitTermination()
    wanted = to_arrow(spark.table("spark_state")).sort_by(order)
    ours = {"k": plain.column("k"), "day": plain.column("day")}
    for f in functions:
        ours[f.name] = f.result([plain.column(name).combine_chunks() for name in f.columns()])
    found = pa.table(ours).sort_by(order)
    assert found.num_rows == 3 * 6 and wanted.column_names == found.column_names
    for name in wanted.column_names:
        assert repr(found.column(name).to_pylist()) == repr(wanted.column(name).to_pylist()), name


def _measurements(seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    odd_nan = np.array([0xFFF8000000000123], np.uint64).view(np.float64)[0]
    keys = np.array([np.nan, odd_nan, -0.0, 0.0, 1.5, -2.5, np.inf])[random.integers(0, 7, 400)]
    return pa.table(
        {
            "k": pa.array(keys, mask=random.random(400) < 0.1),  # a NaN, not a null
            "day": pa.array(random.integers(0, 2, 400), pa.int32(), mask=random.random(400) < 0.2).cast(pa.date32()),
            "v": pa.array(random.integers(-(10**9), 10**9, 400), mask=random.random(400) < 0.1),
            "s": pa.array([f"s{n}" for n in random.integers(0, 999, 400)]),
            "x": pa.array(random.normal(size=400)),
            "t": pa.array(random.permutation(400) + 400 * seed),
        }
    )
