"""The tester for users comes to what Spark comes to: the same state after every step, and the same dead letters."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import siltstone as st
from siltstone.sinks.parquet import ParquetSink
from siltstone.spark.operations import RunRequest, run
from siltstone.testing import StreamTester
from tests.spark_runs import at, digests
from tests.spark_streams import source_of

NAN = float("nan")
SCHEMA = pa.schema(
    [
        ("user", pa.string()),
        ("code", pa.string()),
        ("weight", pa.float64()),
        ("small", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
BATCHES = [
    pa.table(
        {
            "user": ["ab"[(n + step) % 2] if n % 5 else None for n in range(40)],
            "code": [str(n % 7) for n in range(40)],
            "weight": [[NAN, None, -0.0, 0.0, 1.5, -2.5, 3.0, 4.0][(n * step) % 8] for n in range(40)],
            "small": range(40),
            "at": [n * 1_000_000 * step for n in range(40)],
        },
        schema=SCHEMA,
    )
    for step in (1, 2, 3)
]


class Ordered(st.Operator):
    """The rows of each code, in order; text is cast to the key's type."""

    name = "ordered"
    key: ClassVar = {"code": pa.int32()}
    order_by = ("weight", "small")
    output: ClassVar = {"code": pa.int32(), "weight": pa.float64(), "small": pa.int64()}
    history = st.ListState({"weight": pa.float64(), "small": pa.int64()})

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Keep, and hand on."""
        state.history.append(rows.keys, rows.key_index, rows.table.select(["weight", "small"]))
        return rows.table.select(["code", "weight", "small"])


def chained(where: Any = None) -> st.Stream:
    """Of an operator, an aggregate of its output, and one that combines the source's rows."""
    weights = st.Aggregate(
        "weights", {"weight": pa.float64()}, [st.Sum("sum", of="small")], reads="ordered", nullable=("weight",)
    )
    users = st.Aggregate(
        "users",
        {"user": pa.string(), "at": pa.timestamp("us", "UTC")},
        [st.Count("n"), st.Max("most", of="small"), st.Average("mean", of="small")],
        nullable=("user",),
        map_side=True,
    )
    return st.Stream("chained", where, [Ordered(), weights, users], max_parallelism=8)


def test_state_has_the_same_digests_as_under_spark(spark: SparkSession, tmp_path: Path) -> None:
    run(at(tmp_path / "w"), chained(source_of(BATCHES)), RunRequest())
    with StreamTester(chained(), parallelism=3) as tester:
        found = {}
        for step, batch in enumerate(BATCHES, 1):
            tester.step(batch)
            found[step] = tester.digest
        assert found == digests(at(tmp_path / "w"), "chained")
        tester.replay(parallelism=1)


def test_the_same_rows_are_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    bad = pa.table({"code": ["1", "01", None, "x", "2"], "weight": [1.0] * 5, "small": range(5)})

    def stream(source: Any, sink: Any = None) -> st.Stream:
        return st.Stream(
            "bad", source, [Ordered()], sinks={"dead_letters": sink}, on_bad_row="dead-letter", max_parallelism=8
        )

    run(at(tmp_path / "w"), stream(source_of([bad]), ParquetSink(tmp_path / "letters")), RunRequest())
    with StreamTester(stream(None)) as tester:
        tester.step(bad)
        assert {1: tester.digest} == digests(at(tmp_path / "w"), "bad")
        told = [letters(tester.dead_letters), letters(pq.read_table([*(tmp_path / "letters").rglob("*.parquet")]))]
    assert told[0] == told[1] and len(told[0]) == 3


def letters(table: pa.Table) -> list[Any]:
    """What dead letters say."""
    return sorted((row["reason"], row["step"], str(json.loads(row["row"]))) for row in table.to_pylist())
