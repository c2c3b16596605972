"""Compare windows that close with Spark's own: K rows of K distinct keys and windows per step, and K windows close.

    python -m benchmarks.windows SYSTEM INPUT WORK RESULT       one system, in a process of its own

Rows of a step are of one minute, and those of the next one of a minute that is 1 or 4 later. The watermark is 9 minutes
behind, so the windows of 11 or 4 steps are open, S = 11 K or 4 K, and each step closes those of one step. All systems
count and sum per key and window of a minute, in alternating rounds (`benchmarks.rounds`):

    heap        `Aggregate(window=...)`, each micro-batch a checkpoint
    rocksdb     the same with working state in RocksDB
    spark       `groupBy(window, key)` on Spark's RocksDB state store with changelog checkpointing, append mode

Closed windows are computed and go no further: Siltstone's operator has no sink, Spark's query the `noop` sink. RESULT
is that of `benchmarks.systems`, with the windows that each step closed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.beside import HEAP, OWN_ROCKSDB, PEER, compare
from benchmarks.goals import Report
from benchmarks.rounds import Run
from benchmarks.systems import OPERATOR, ROCKSDB, main, run_stream, source, to_end
from benchmarks.workload import KEY, VALUE, Workload
from siltstone.aggregates.functions import Count, Sum
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime

AT, SIZE, SIZE_US = "at", "1 minute", 60_000_000
DELAY_MINUTES = 9
DELAY = f"{DELAY_MINUTES} minutes"
_FIRST_US = 28_333_334 * SIZE_US


@dataclass(frozen=True)
class WindowWorkload(Workload):
    """Steps of `step_rows` rows, each of a key of its own; the value is the event time, in microseconds since 1970.

    `apart` is the minutes from one step to the next.
    """

    apart: int = 1

    @classmethod
    def of(cls, step_rows: int, warm_up: int, measured: int, apart: int) -> "WindowWorkload":
        """Make the workload, whose state is as large as the windows that are open.

        Step n + 1 has the watermark that step n has moved, to less than `DELAY_MINUTES` before the end of its window.
        """
        return cls((DELAY_MINUTES // apart + 2) * step_rows, step_rows, warm_up, measured, apart=apart)

    @property
    def load_steps(self) -> int:
        return self.state_rows // self.step_rows

    def draw(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random = np.random.default_rng(self.seed)
        for step in range(self.batches):
            times = random.integers(0, SIZE_US, self.step_rows)
            times[0] = SIZE_US - 1  # so that each step moves the watermark as far
            yield random.permutation(self.step_rows), _FIRST_US + step * self.apart * SIZE_US + times


FULL = tuple(WindowWorkload.of(100_000, warm_up=4, measured=15, apart=apart) for apart in (4, 1))
QUICK = (WindowWorkload.of(10_000, warm_up=2, measured=4, apart=4),)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each workload."""
    workloads = QUICK if quick else FULL
    return compare("benchmarks.windows", "windows, open and per step", workloads, check_closed, scratch, quick=quick)


def check_closed(run: Run) -> None:
    """Check that each measured step took all its rows, and closed as many windows.

    Raises:
        RuntimeError: one did not: the systems did not do the same.
    """
    wanted = run.workload.step_rows
    found = {(step["rows"], step["closed"]) for step in run.measured}
    if found != {(wanted, wanted)} or len(run.measured) != run.workload.measured:
        raise RuntimeError(f"{run.system}: steps have rows and closed windows {found}, not {wanted} of each")


def read(spark: SparkSession, directory: str) -> DataFrame:
    """Read the workload's files, with the event time."""
    return source(spark, directory).withColumn(AT, F.timestamp_micros(VALUE))


def run_siltstone(spark: SparkSession, inputs: Path, work: Path, backend: str) -> list[dict[str, Any]]:
    """Run `Aggregate` with a window."""
    functions = [Count("rows"), Sum("total", of=VALUE)]
    operator = Aggregate(OPERATOR, key={KEY: pa.int64()}, aggregates=functions, window=Tumbling(SIZE, on=AT))
    stream = Stream("bench", None, [operator], event_time=EventTime(AT, delay=DELAY))
    steps, before = run_stream(stream, spark, inputs, work, read, backend=backend), 0
    for step in steps:  # each row is of another window
        step["closed"] = before + step["rows"] - step["state_rows"]
        before = step["state_rows"]
    return steps


def run_spark(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run Spark's own windowed aggregation."""
    for key, value in ROCKSDB.items():
        spark.conf.set(key, value)
    rows = read(spark, str(inputs)).withWatermark(AT, DELAY)
    totals = rows.groupBy(KEY, F.window(AT, SIZE)).agg(F.count(F.lit(1)).alias("rows"), F.sum(VALUE).alias("total"))
    writer = totals.writeStream.format("noop").outputMode("append")
    writer = writer.option("checkpointLocation", str(work / "checkpoint")).trigger(availableNow=True)
    return [step | {"bytes": 0, "base": False, "closed": step["rows_out"]} for step in to_end(writer.start())]


SYSTEMS = {
    HEAP: partial(run_siltstone, backend="heap"),
    OWN_ROCKSDB: partial(run_siltstone, backend="rocksdb"),
    PEER: run_spark,
}

if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
