"""Measure the seconds and memory to start a stream with few and with very many recorded steps.

Two streams of Spark's `rate` source are started in turn, in one Spark, several times; each start runs one micro-batch.
One has 100 recorded steps, the other 1,000,000, written into the catalog at once as if one checkpoint had them. The
first checkpoint of each is kept, and so is its whole log.
"""

import re
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import PropertyMock, patch

import pyarrow as pa
from sqlalchemy import create_engine, insert, update

from benchmarks.goals import Goal, Report, table_of
from siltstone.aggregates.operator import Aggregate, Count
from siltstone.catalog.database import tables as t
from siltstone.catalog.records.steps import StepKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FEW, MANY = 100, 1_000_000
STARTS = 15
RATIO = 1.3
_AT_ONCE = 10_000
_FAR = 10**9


def source(spark: "SparkSession", _: Mapping[str, str]) -> "DataFrame":
    """Make a source with one row per second."""
    rows = spark.readStream.format("rate").option("rowsPerSecond", 1).option("numPartitions", 1).load()
    return rows.selectExpr("value % 8 as key")


STREAM = Stream(
    "ticks", source, [Aggregate("ticks", {"key": pa.int64()}, [Count("n")], output=False)], max_parallelism=4
)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure both streams."""
    from siltstone.spark import operations

    def start(settings: Settings) -> None:
        result = operations.run(settings, STREAM, operations.RunRequest(batches=1, follow=True))
        assert len(result.checkpoints) == 1

    counts = (FEW, MANY // 10 if quick else MANY)
    settings = {n: Settings(warehouse=str(scratch / str(n)), parallelism=1, master="local[2]") for n in counts}
    for n in counts:
        for _ in range(2):
            start(settings[n])
            time.sleep(1.1)
        _seed(settings[n], n)
        start(settings[n])
    started: dict[int, list[float]] = {n: [] for n in counts}
    read: dict[int, list[float]] = {n: [] for n in counts}
    for turn in range(3 if quick else STARTS):
        time.sleep(1.1)  # so that there is a row to read
        for n in counts if turn % 2 else reversed(counts):
            started[n].append(_seconds(lambda n=n: start(settings[n])))
            read[n].append(_seconds(lambda n=n: _read(settings[n])))
    return _report(counts, started, read, {n: _peak_bytes(lambda n=n: _read(settings[n])) for n in counts})


def _seed(settings: Settings, steps: int) -> None:
    """Make a checkpoint with a number of steps: a real one, with added rows in the input log."""
    from siltstone.spark.operations import open_region
    from siltstone.spark.runner import StreamRunner
    from siltstone.spark.session import spark_session

    with OpenWarehouse.open_existing(settings.warehouse) as warehouse:
        region = open_region(settings, STREAM, warehouse, {}, 1)
        last = region.input_position().newest[-1]
        begins = warehouse.catalog.input_log.get_position(STREAM.name, 0).beginning
        assert begins is not None

        spark = spark_session(settings.master, settings.spark, steps=True)
        later = patch.object(ConsistentRegion, "step", PropertyMock(return_value=last.step + steps))

        def advance(_: object) -> dict[str, Any]:
            later.start()
            return {}

        checkpoint = StreamRunner(spark, region).change(changed=advance).id
        later.stop()
        region.close("done")
        url = f"sqlite:///{warehouse.warehouse.local.catalog}"
    *header, offset = last.offsets.splitlines()
    # The newest step was read just now, at one row per second.
    began_ms = int(time.time() * 1000) - (int(offset) + steps) * 1000
    s, engine = t.step.c, create_engine(url)
    with engine.begin() as connection:
        sources = re.sub(r"\d{13}", str(began_ms), begins.sources)
        connection.execute(update(t.step).where(s.step == 0).values(sources=sources))
        for first in range(2, steps + 1, _AT_ONCE):  # the first one is the change
            rows = [
                {
                    "stream": STREAM.name,
                    "checkpoint": checkpoint,
                    "step": last.step + n,
                    "kind": StepKind.BATCH,
                    "batch_id": last.batch + n - 1,
                    "offsets": "\n".join([*header, str(int(offset) + n - 1)]),
                    "sources": None,
                }
                for n in range(first, min(first + _AT_ONCE, steps + 1))
            ]
            connection.execute(insert(t.step), rows)
    engine.dispose()


def _read(settings: Settings) -> None:
    """Read the part of the input log that a start reads."""
    with OpenWarehouse.open_existing(settings.warehouse) as warehouse:
        position = warehouse.catalog.input_log.get_position(STREAM.name, _FAR)
        assert len(position.newest) == 2 and warehouse.catalog.input_log.list_logged(STREAM.name) == []


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _peak_bytes(call: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _report(
    counts: tuple[int, int],
    started: Mapping[int, list[float]],
    read: Mapping[int, list[float]],
    memory: Mapping[int, int],
) -> Report:
    start_s = {n: statistics.median(started[n]) for n in counts}
    read_s = {n: statistics.median(read[n]) for n in counts}
    table = table_of(
        "starting a stream of a rate source", "recorded steps", "start s", "reading the log s", "its peak MB"
    )
    for n in counts:
        table.add_row(f"{n:,}", f"{start_s[n]:.2f}", f"{read_s[n]:.4f}", f"{memory[n] / 1e6:.2f}")
    few, many = counts
    report = Report([table])
    report.goals = [
        Goal(f"startup: {many:,} recorded steps over {few}, seconds", start_s[many] / start_s[few], at_most=RATIO),
        Goal(f"startup: {many:,} recorded steps over {few}, memory", memory[many] / memory[few], at_most=RATIO),
    ]
    report.numbers = {str(n): {"start_s": started[n], "read_s": read[n], "peak_bytes": memory[n]} for n in counts}
    return report
