"""Compare the time from a row's arrival to its being visible in a durable sink with that of Spark's own stateful query.

    python -m benchmarks.latency SYSTEM WORK

Spark's rate source gives `ROWS_PER_S` rows a second, all rows of a second when it is over: this is when they arrive.
Both systems keep the same aggregates per key, and poll the source every 10 ms (Spark's default; Siltstone's is 100 ms).
Both hand the changed keys to the same function: it writes and syncs a file, renames it, syncs the directory, and then
notes the time. Siltstone's sink is an `ArrowSink`, and Spark's `foreachBatch` makes a table of its rows. Rows of a
micro-batch have keys of their own, so each row's time counts. The systems take turns in rounds, each in a process of
its own, which is killed when it has run for long enough. Its first seconds do not count.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

import siltstone as st
from benchmarks.goals import Goal, Report, spread_of, table_of
from benchmarks.rounds import in_turn, own_process
from benchmarks.systems import CORES, OPERATOR, ROCKSDB, SPARK
from siltstone.aggregates.operator import Aggregate, Count, Max
from siltstone.spark.session import spark_session
from siltstone.store.files import make_durable

ROWS_PER_S, KEYS = 1000, 100_000
OURS, PENDING, PEER = "siltstone", "siltstone-pending", "rocksdb"
TITLES = {OURS: "Siltstone", PENDING: "Siltstone, 2 pending", PEER: "Spark, RocksDB"}
PERCENTILES = (50, 99)
AT_MOST = {OURS: 1.1, PENDING: 1.3}
"""goals of p99, as multiples of Spark's"""
DELIVERED, OUTPUT = "delivered", "output"
_START_S = 300.0
"""most seconds until the first delivery"""

Rounds = Mapping[str, Sequence[Mapping[int, float]]]
"""system -> in each round, percentile -> seconds"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure every system in rounds: 10 minutes each, all rounds together."""
    rounds, warm_up_s, measured_s = (1, 10.0, 20.0) if quick else (3, 30.0, 200.0)
    progress, found = Console(stderr=True), {system: list[Mapping[int, float]]() for system in TITLES}
    for number in range(rounds):
        for system in in_turn(TITLES, number):
            progress.print(f"round {number + 1} of {rounds}: {TITLES[system]} ...")
            with tempfile.TemporaryDirectory(dir=scratch) as work:
                seconds = measure(system, Path(work), warm_up_s, measured_s)
            found[system].append({each: float(np.percentile(seconds, each)) for each in PERCENTILES})
    return report_of(found)


def measure(system: str, work: Path, warm_up_s: float, measured_s: float) -> np.ndarray:
    """Run one system in a process of its own; return the seconds from arrival to visibility of each row.

    Raises:
        RuntimeError: it delivered nothing, or ended; the message ends with its output.
    """
    (work / OUTPUT).mkdir()
    with (
        (work / "said").open("w+") as said,
        own_process("benchmarks.latency", system, str(work), said=said) as process,
    ):
        give_up = time.monotonic() + _START_S
        while not (work / DELIVERED).exists() and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.1)
        began = time.time() + warm_up_s
        time.sleep(warm_up_s + measured_s if (work / DELIVERED).exists() else 0)
        if process.poll() is not None or not (work / DELIVERED).exists():
            said.seek(0)
            raise RuntimeError(f"{system} delivered nothing, or ended:\n{said.read()[-4000:]}")
    return delays(work, began, began + measured_s)


def delays(work: Path, began: float, ended: float) -> np.ndarray:
    """Return the seconds until each row was visible, of rows that became visible between two times (epoch seconds)."""
    found = []
    for line in (work / DELIVERED).read_text().splitlines():
        name, seen = line.split()
        if began <= float(seen) < ended:
            arrived = pq.read_table(work / OUTPUT / name, columns=["arrived"]).column(0).to_numpy()
            found.append(float(seen) - arrived / 1000)
    return np.concatenate(found)


def deliver(work: Path, table: pa.Table, number: int) -> None:
    """Write rows durably, then note when they were visible: the sink of both systems."""
    name, directory = f"{number:06d}.parquet", work / OUTPUT
    if not len(table):
        return
    draft = directory / f".{name}"
    pq.write_table(table, draft)
    make_durable(draft)
    draft.rename(directory / name)
    make_durable(directory)
    with (work / DELIVERED).open("a") as file:
        file.write(f"{name} {time.time()!r}\n")


def arriving(spark: SparkSession) -> DataFrame:
    """Make the source: `arrived` is the end of a row's second, in ms since the epoch."""
    rows = spark.readStream.format("rate").option("rowsPerSecond", ROWS_PER_S).option("numPartitions", CORES).load()
    arrived = f"unix_millis(timestamp) + 1000 - pmod(value, {ROWS_PER_S}) * 1000 div {ROWS_PER_S} AS arrived"
    return rows.selectExpr(f"pmod(value, {KEYS}) AS key", arrived)


def run_siltstone(spark: SparkSession, work: Path, max_pending: int) -> None:
    """Run `Aggregate`, each micro-batch a checkpoint."""
    functions = [Count("rows"), Max("arrived", of="arrived")]
    operators = [Aggregate(OPERATOR, key={"key": pa.int64()}, aggregates=functions)]
    sink = st.ArrowSink(lambda rows, number: deliver(work, rows.read_all(), number))
    stream = st.Stream("latency", None, operators, sinks={OPERATOR: sink})
    settings = {"warehouse": str(work / "warehouse"), "parallelism": CORES, "max_pending": max_pending}
    st.write_stream(arriving(spark), stream, **settings).await_termination()


def run_rocksdb(spark: SparkSession, work: Path) -> None:
    """Run Spark's own stateful aggregation."""
    for key, value in ROCKSDB.items():
        spark.conf.set(key, value)
    totals = arriving(spark).groupBy("key").agg(F.count(F.lit(1)).alias("rows"), F.max("arrived").alias("arrived"))

    def take(rows: DataFrame, number: int) -> None:
        deliver(work, rows.toArrow(), number)

    writer = totals.writeStream.foreachBatch(take).outputMode("update")
    writer.option("checkpointLocation", str(work / "checkpoint")).start().awaitTermination()


SYSTEMS: Mapping[str, Callable[[SparkSession, Path], None]] = {
    OURS: partial(run_siltstone, max_pending=0),
    PENDING: partial(run_siltstone, max_pending=2),
    PEER: run_rocksdb,
}


def report_of(found: Rounds) -> Report:
    """Compare the systems: p99 has a goal."""
    title = f"from a row's arrival to its being visible in a durable sink, {ROWS_PER_S:,} rows per second"
    report = Report([table := table_of(title, "system", *(f"p{each} s, rounds" for each in PERCENTILES))])
    for system, rounds in found.items():
        table.add_row(TITLES[system], *(spread_of([times[each] for times in rounds]) for each in PERCENTILES))
        report.numbers[system] = [{f"p{each}_s": seconds for each, seconds in times.items()} for times in rounds]
    for system, at_most in AT_MOST.items():
        for each in PERCENTILES:
            ratios = [a[each] / b[each] for a, b in zip(found[system], found[PEER], strict=True)]
            what = f"latency, p{each}: {TITLES[system]} / {TITLES[PEER]}"
            report.goals.append(Goal.of_rounds(what, ratios, at_most=at_most if each == 99 else None))
    return report


def main(system: str, work: Path) -> None:
    """Run one system until the process is killed."""
    settings = {"spark.local.dir": str(work / "spark"), "spark.sql.streaming.pollingDelay": "10ms"}
    spark = spark_session(f"local[{CORES}]", SPARK | settings, steps=True)
    SYSTEMS[system](spark, work)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
