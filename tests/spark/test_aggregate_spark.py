"""`Aggregate` equals Spark's own aggregation, with `combine` run inside Spark before its rows are merged."""

from decimal import Decimal
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from siltstone.aggregates.operator import Aggregate, Average, Count, First, Last, Max, Min, Sum
from siltstone.errors import BadRow
from tests.arrow_frames import from_arrow, to_arrow
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
            yield from operator.combine(pa.Table.from_batches([batch])).to_batches()

    frame = from_arrow(spark, table).repartition(3)
    partial = to_arrow(frame.mapInArrow(run, from_arrow_schema(operator.combined)))
    assert partial.num_rows <= 3 * 40 * 2
    with subtask(operator) as task:
        got = task.process(partial)
    frame.createOrReplaceTempView("rows")
    expected = to_arrow(spark.sql(BY_SPARK))
    for table in (got, expected):
        assert table.num_rows == 40
    names = operator.output.names
    ours, theirs = (t.select(names).sort_by("k").to_pydict() for t in (got, expected))
    for name in names:
        assert list(map(repr, ours[name])) == list(map(repr, theirs[name])), f"{name} differs from Spark's"


@pytest.mark.parametrize(
    ("kind", "of_spark", "values", "fits"),
    [
        (pa.int64(), "bigint", [2**63 - 1, 1, -5], True),
        (pa.int64(), "bigint", [2**63 - 6, 5, -3], True),
        (pa.int64(), "bigint", [2**63 - 1, 1, 5], False),
        (pa.int64(), "bigint", [-(2**63), 0, -1], False),
        (pa.decimal128(38, 2), "decimal(38,2)", [Decimal(10**36 - 1), Decimal("0.99"), Decimal(0)], True),
        (pa.decimal128(38, 2), "decimal(38,2)", [Decimal(10**36 - 1), Decimal("0.99"), Decimal("0.01")], False),
    ],
)
def test_a_sum_overflows_where_sparks_does(spark, kind, of_spark, values, fits):
    """Spark looks after each addition, in an order of its own: compared are its sums of wider numbers, and whether a
    value of the type holds them."""
    table = pa.table({"k": pa.array([1] * len(values)), "v": pa.array(values, kind)})
    frame = from_arrow(spark, table)
    wider = f"try_sum(cast(v as decimal(38,{kind.scale if pa.types.is_decimal(kind) else 0})))"
    with subtask(Aggregate("a", {"k": pa.int64()}, [Sum("total", of="v", type=kind)])) as task:
        [exact] = frame.selectExpr(f"try_cast({wider} as {of_spark}) total").first()
        assert (exact is not None) == fits
        if fits:
            assert task.process(table).column("total").to_pylist() == [exact]
        else:
            with pytest.raises(BadRow, match="total of column v leaves"):
                task.process(table)


def test_an_average_of_timestamps_is_sparks_average_of_decimals(spark):
    random = Random(3)
    micros = [1_700_000_000_000_000 + random.randrange(10**9) for _ in range(9000)]
    table = pa.table({"k": pa.array([n % 3 for n in range(9000)]), "v": pa.array(micros)})
    with subtask(Aggregate("a", {"k": pa.int64()}, [Average("mean", of="v")], output=True)) as task:
        for start in range(0, 9000, 4500):
            got = task.process(table.slice(start, 4500)).sort_by("k").column("mean").to_pylist()
    frame = from_arrow(spark, table).groupBy("k").agg(F.avg(F.col("v").cast("decimal(20,0)")).alias("mean"))
    exact = [float(row.mean) for row in frame.orderBy("k").collect()]
    assert np.allclose(got, exact, rtol=0, atol=0.26), "doubles this large are a quarter apart"
    assert min(got) > 1_700_000_000_000_000
