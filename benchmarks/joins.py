"""Compare a join by interval with Spark's own: K left and K right rows per step, each of which finds one partner.

    python -m benchmarks.joins SYSTEM INPUT WORK RESULT       one system, in a process of its own

Rows of a step are of one minute, and those of the next one of the minute after. A right row of a step has the key of a
left row of `APART` steps before, and no other. Partners are up to `WITHIN_MINUTES` apart either way, so both sides keep
the rows of 11 steps: S = 22 K. All systems return the pairs, and read the same files twice, once for each side, in
alternating rounds (`benchmarks.rounds`):

    heap        `IntervalJoin` of two sources, each micro-batch a checkpoint
    rocksdb     the same with working state in RocksDB
    spark       an inner join of two streams on Spark's RocksDB state store with changelog checkpointing

Pairs are made and go no further: Siltstone's operator has no sink, Spark's query the `noop` sink. RESULT is that of
`benchmarks.systems`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
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
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.joins.interval import IntervalJoin
from siltstone.run.progress import RunProgress
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime

MINUTE_US = 60_000_000
WITHIN_MINUTES, APART, KEPT_STEPS = 9, 3, 11
LEFT, RIGHT, AT = "left", "right", "at"
_TIME = pa.timestamp("us", "UTC")
_FIRST_US = 28_333_334 * MINUTE_US


@dataclass(frozen=True)
class JoinWorkload(Workload):
    """Steps of `step_rows` rows, half of them of each side: a left one has an even key, a right one an odd one. The
    value is the event time, in microseconds since 1970."""

    @classmethod
    def of(cls, side_rows: int, warm_up: int, measured: int) -> "JoinWorkload":
        """Make the workload with this number of rows of each side per step."""
        return cls(2 * KEPT_STEPS * side_rows, 2 * side_rows, warm_up, measured)

    @property
    def load_steps(self) -> int:
        return KEPT_STEPS

    def draw(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random, size = np.random.default_rng(self.seed), self.step_rows // 2
        for step in range(self.batches):
            ids = np.arange(size)
            left, right = step * size + ids, (step - APART) * size + ids  # of the first steps without a partner
            keys = np.concatenate([2 * left, 2 * right + 1])
            times = random.integers(0, MINUTE_US, len(keys))
            times[[0, size]] = MINUTE_US - 1  # so that each step moves both watermarks as far
            order = random.permutation(len(keys))
            yield keys[order], (_FIRST_US + step * MINUTE_US + times)[order]


FULL = (JoinWorkload.of(50_000, warm_up=4, measured=15),)
QUICK = (JoinWorkload.of(5_000, warm_up=2, measured=4),)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each workload."""
    workloads = QUICK if quick else FULL
    return compare("benchmarks.joins", "joins, kept and per step", workloads, check_pairs, scratch, quick=quick)


def check_pairs(run: Run) -> None:
    """Check that each measured step read all its rows and found a partner for each right one.

    Raises:
        RuntimeError: one did not: the systems did not do the same.
    """
    wanted = run.workload.step_rows // 2
    found = {step["rows_out"] for step in run.measured}
    if found != {wanted} or len(run.measured) != run.workload.measured:
        raise RuntimeError(f"{run.system}: steps return {found} pairs, not {wanted} each")


def read(spark: SparkSession, directory: str) -> dict[str, DataFrame]:
    """Read the workload's files, each side by itself."""
    sides = {}
    for number, side in enumerate((LEFT, RIGHT)):
        rows = source(spark, directory).where(F.pmod(KEY, F.lit(2)) == number)
        sides[side] = rows.select(F.floor(F.col(KEY) / 2).alias(KEY), F.timestamp_micros(VALUE).alias(AT))
    return sides


class Returned(RunProgress):
    """Counts the rows that the steps of a run return, of those that read some."""

    def __init__(self) -> None:
        super().__init__("bench")
        self.rows_out: list[int] = []

    def add_step(self, received: Mapping[str, Sequence[Acknowledgement]], moves: int) -> None:
        """Count a step."""
        super().add_step(received, moves)
        if sum(each.rows_in for each in received[OPERATOR]):
            self.rows_out.append(sum(each.rows_out for each in received[OPERATOR]))


def run_siltstone(spark: SparkSession, inputs: Path, work: Path, backend: str) -> list[dict[str, Any]]:
    """Run `IntervalJoin`."""
    operator = IntervalJoin(
        OPERATOR,
        key={KEY: pa.int64()},
        reads={LEFT: {KEY: KEY}, RIGHT: {KEY: KEY}},
        on={LEFT: AT, RIGHT: AT},
        columns={LEFT: {AT: _TIME}, RIGHT: {AT: _TIME}},
        between=(f"-{WITHIN_MINUTES} minutes", f"{WITHIN_MINUTES} minutes"),
        names={RIGHT: {AT: f"{RIGHT}_{AT}"}},
    )
    times = {LEFT: EventTime(AT), RIGHT: EventTime(AT)}
    stream = Stream("bench", sources={LEFT: None, RIGHT: None}, operators=[operator], event_time=times)
    returned = Returned()
    steps = run_stream(stream, spark, inputs, work, read, returned, backend=backend)
    for step, rows in zip(steps, returned.rows_out, strict=True):
        step["rows_out"] = rows
    return steps


def run_spark(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run Spark's own join of two streams."""
    for key, value in ROCKSDB.items():
        spark.conf.set(key, value)
    sides = {name: rows.withWatermark(AT, "0 seconds").alias(name) for name, rows in read(spark, str(inputs)).items()}
    within = f"interval {WITHIN_MINUTES} minutes"
    condition = (
        f"{LEFT}.{KEY} = {RIGHT}.{KEY} and {RIGHT}.{AT} between {LEFT}.{AT} - {within} and {LEFT}.{AT} + {within}"
    )
    pairs = sides[LEFT].join(sides[RIGHT], F.expr(condition))
    pairs = pairs.select(f"{LEFT}.{KEY}", f"{LEFT}.{AT}", F.col(f"{RIGHT}.{AT}").alias(f"{RIGHT}_{AT}"))
    writer = pairs.writeStream.format("noop").outputMode("append")
    writer = writer.option("checkpointLocation", str(work / "checkpoint")).trigger(availableNow=True)
    return [step | {"bytes": 0, "base": False} for step in to_end(writer.start())]


SYSTEMS = {
    HEAP: partial(run_siltstone, backend="heap"),
    OWN_ROCKSDB: partial(run_siltstone, backend="rocksdb"),
    PEER: run_spark,
}

if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
