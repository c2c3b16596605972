"""`Aggregate` equals Spark's own aggregation, with `partial` run inside Spark before its rows are merged."""

from random import Random

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from siltstone.aggregate import Aggregate, Average, Count, First, Last, Max, Min, Sum
from tests.arrow_strategies import random_array
from tests.subtask import subtask

ROWS = 3000
FUNCTIONS = [
    Count("n"),
    Count("n_v", of="v"),
    Sum("total", of="v"),
    Sum("cents", of="d", type=pa.decimal128(18, 4)),
    Average("mean", of="v"),
    Min("lo", of="s", type=pa.string()),
    Max("hi", of="x", type=pa.float64()),
    First("first", of="v", by="t"),
    Last("last", of="v", by="t"),
]
BY_SPARK = """
    select k, count(*) n, count(v) n_v, sum(v) total, sum(d) cents, avg(v) mean, min(s) lo, max(x) hi,
        min(struct(t, v)) filter (where v is not null and t is not null).v first,
        max(struct(t, v)) filter (where v is not null and t is not null).v last
    from rows group by k
"""


def test_partial_inside_spark_then_merged_equals_spark(spark):
    random = Random(7)
    times = pa.array([random.choice([None, *range(50)]) for _ in range(ROWS)], pa.int64())
    table = pa.table(
        {
            "k": pa.array([random.randrange(40) for _ in range(ROWS)], pa.int64()),
            "v": pa.array([random.choice([None, random.randrange(-(10**9), 10**9)]) for _ in range(ROWS)], pa.int64()),
            "d": random_array(random, pa.decimal128(18, 4), ROWS),
            "s": random_array(random, pa.string(), ROWS),
            "x": random_array(random, pa.float64(), ROWS),
            "t": times.cast(pa.timestamp("us", "UTC")),
        }
    )
    operator = Aggregate("a", key={"k": pa.int64()}, aggregates=FUNCTIONS, map_side=True)

    def run(batches):
        for batch in batches:
            yield from operator.partial(pa.Table.from_batches([batch])).to_batches()

    frame = spark.createDataFrame(table).repartition(3)
    partial = frame.mapInArrow(run, from_arrow_schema(operator.partial_schema)).toArrow()
    assert partial.num_rows <= 3 * 40 * 2
    with subtask(operator) as task:
        got = task.process(partial)
    frame.createOrReplaceTempView("rows")
    expected = spark.sql(BY_SPARK).toArrow()
    for table in (got, expected):
        assert table.num_rows == 40
    names = operator.output.names
    ours, theirs = (t.select(names).sort_by("k").to_pydict() for t in (got, expected))
    for name in names:
        assert list(map(repr, ours[name])) == list(map(repr, theirs[name])), f"{name} differs from Spark's"
