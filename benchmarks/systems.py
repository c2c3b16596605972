"""Run one system under one workload in a process of its own: `python -m benchmarks.systems SYSTEM INPUT WORK RESULT`.

    siltstone           `Aggregate`, each micro-batch a checkpoint: digest, fsync and catalog commit on, default policy
    siltstone-rocksdb   the same with working state in RocksDB
    siltstone-pending   the same as siltstone, with at most two checkpoints pending
    siltstone-seldom    the same as siltstone, with a checkpoint each `SELDOM` micro-batches
    rocksdb             the same query on Spark's RocksDB state store with changelog checkpointing, update mode
    stateless           the same aggregation of each micro-batch by itself, in foreachBatch: the cost without state

All read the same files, one step per trigger, on two cores. None of them passes output rows to Python: Siltstone's
operator has no output, Spark's goes to the `noop` sink. `triggerExecution` is Spark's own measure of a trigger, from
the query's progress. RESULT is JSON: per batch, when it began, the trigger's milliseconds, when its checkpoint was
complete, and the system's own numbers. Times are seconds since the epoch.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.workload import FILES_A_STEP, KEY, VALUE
from siltstone.aggregates.operator import Aggregate, Count, Max, Min, Sum
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.model import Form
from siltstone.run.progress import RunProgress
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.spark.operations import open_region
from siltstone.spark.runner import StreamRunner
from siltstone.spark.session import spark_session
from siltstone.spark.sources import make_input
from siltstone.stream import Stream

System = Callable[[SparkSession, Path, Path], list[dict[str, Any]]]
"""session, input files, work directory -> the numbers of each step"""
CORES = 2
OPERATOR = "totals"
SELDOM = 100
SPARK = {
    "spark.driver.memory": "3g",
    "spark.sql.shuffle.partitions": str(CORES),
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Counting rows would cost Spark a read for every write.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
}


def source(spark: SparkSession, directory: str) -> DataFrame:
    """Read the workload's files, one step per micro-batch."""
    reader = spark.readStream.schema(f"`{KEY}` bigint, `{VALUE}` bigint")
    return reader.option("maxFilesPerTrigger", FILES_A_STEP).parquet(directory)


def totals_stream(name: str) -> Stream:
    """Make the stream, without a source, that keeps the four aggregates per key and returns no rows."""
    functions = [Count("rows"), Sum("total", of=VALUE), Min("least", of=VALUE), Max("most", of=VALUE)]
    return Stream(name, None, [Aggregate(OPERATOR, key={KEY: pa.int64()}, aggregates=functions, output=False)])


def aggregates() -> list[Column]:
    """Make the four aggregates as Spark columns."""
    return [
        F.count(F.lit(1)).alias("rows"),
        F.sum(VALUE).alias("total"),
        F.min(VALUE).alias("least"),
        F.max(VALUE).alias("most"),
    ]


def run_siltstone(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run `Aggregate`."""
    return run_stream(totals_stream("bench"), spark, inputs, work)


def run_siltstone_on_rocksdb(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run `Aggregate` with its working state in RocksDB."""
    return run_stream(totals_stream("bench"), spark, inputs, work, backend="rocksdb")


def run_siltstone_pending(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run `Aggregate` with pending checkpoints."""
    return run_stream(totals_stream("bench"), spark, inputs, work, max_pending=2)


def run_siltstone_seldom(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run `Aggregate` with few checkpoints."""
    return run_stream(totals_stream("bench"), spark, inputs, work, checkpoint_steps=SELDOM)


def run_stream(
    stream: Stream,
    spark: SparkSession,
    inputs: Path,
    work: Path,
    read: Callable[[SparkSession, str], DataFrame | Mapping[str, DataFrame]] = source,
    progress: RunProgress | None = None,
    **given: Any,
) -> list[dict[str, Any]]:
    """Run a query with a `StreamRunner`.

    Args:
        read: makes its source, or each of its sources by name, given the directory of the workload's files.
        progress: counts the steps.
        given: fields of the settings.
    """
    settings = Settings(warehouse=str(work / "warehouse"), parallelism=CORES, **given)
    with OpenWarehouse.open_writable(settings.warehouse) as warehouse:
        region = open_region(settings, stream, warehouse, {}, CORES)
        completed: list[tuple[Completed, float]] = []
        reads = make_input(stream, read(spark, str(inputs)))
        runner = StreamRunner(
            spark,
            region,
            on_checkpoint=lambda each: completed.append((each, time.time())),
            progress=progress,
            source=reads,
        )
        writer = reads.rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        wait = runner.await_query if stream.is_timed else StreamingQuery.awaitTermination
        steps = to_end(writer.trigger(availableNow=True).start(), wait)
        runner.finish()
        region.close("done")
        checkpoints = warehouse.catalog.checkpoints.list(stream.name)
    last = -1
    for checkpoint, (told, completed_s) in zip(checkpoints, completed, strict=True):
        if last == len(steps) - 1:
            break  # at the end of the input, what is due fires in a step without rows
        begin, last = last + 1, min(last + told.steps, len(steps) - 1)  # one may end an interval of several, too
        for step in steps[begin : last + 1]:
            step |= {"bytes": 0, "base": False, "state_rows": checkpoint.rows}
            step["completed_s"] = max(step["completed_s"], completed_s)
        steps[last] |= {"bytes": checkpoint.bytes, "base": Form.BASE in checkpoint.forms.values()}
        subtasks = checkpoint.statistics["operators"][stream.operators[0].name]["seconds"]
        steps[last]["phases_s"] = {f"slowest subtask: {name}": seconds for name, seconds in subtasks.items()}
        steps[last]["phases_s"]["manifest and catalog"] = told.seconds
    assert last == len(steps) - 1, "each step is in a checkpoint"
    return steps


def run_rocksdb(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run Spark's own stateful aggregation."""
    for key, value in ROCKSDB.items():
        spark.conf.set(key, value)
    totals = source(spark, str(inputs)).groupBy(KEY).agg(*aggregates())
    writer = totals.writeStream.format("noop").outputMode("update")
    writer = writer.option("checkpointLocation", str(work / "checkpoint")).trigger(availableNow=True)
    steps = to_end(writer.start())
    for step in steps:
        version = step["batch"] + 1
        logs = list((work / "checkpoint" / "state" / "0").glob(f"*/{version}.changelog"))
        # A version written as a whole snapshot, such as the first, has no changelog.
        step |= {"bytes": sum(log.stat().st_size for log in logs), "base": len(logs) != CORES}
    return steps


def run_stateless(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run the aggregation of each micro-batch by itself."""

    def aggregate(rows: DataFrame, _: int) -> None:
        rows.groupBy(KEY).agg(*aggregates()).write.format("noop").mode("overwrite").save()

    writer = source(spark, str(inputs)).writeStream.foreachBatch(aggregate)
    writer = writer.option("checkpointLocation", str(work / "checkpoint")).trigger(availableNow=True)
    return [step | {"bytes": 0, "base": False} for step in to_end(writer.start())]


SYSTEMS: dict[str, System] = {
    "siltstone": run_siltstone,
    "siltstone-rocksdb": run_siltstone_on_rocksdb,
    "siltstone-pending": run_siltstone_pending,
    "siltstone-seldom": run_siltstone_seldom,
    "rocksdb": run_rocksdb,
    "stateless": run_stateless,
}


def to_end(
    query: StreamingQuery, wait: Callable[[StreamingQuery], Any] = StreamingQuery.awaitTermination
) -> list[dict[str, Any]]:
    """Wait until all input is processed; return, per batch, its id, rows, times and Spark's durations in milliseconds.

    Spark's own checkpoint of a batch is complete when its trigger ends. `rows_out` is what the query's sink got, -1 if
    it does not count.
    """
    wait(query)
    steps: list[dict[str, Any]] = []
    for p in (json.loads(p.json) for p in query.recentProgress):
        if p["numInputRows"]:
            began_s = datetime.fromisoformat(p["timestamp"]).timestamp()
            trigger_ms = p["durationMs"]["triggerExecution"]
            steps.append(
                {"batch": p["batchId"], "rows": p["numInputRows"], "rows_out": p["sink"]["numOutputRows"]}
                | {"trigger_ms": trigger_ms, "began_s": began_s}
                | {"completed_s": began_s + trigger_ms / 1000, "durations_ms": p["durationMs"]}
            )
    return steps


def live_heap_bytes(spark: SparkSession) -> int:
    """Return the bytes of the JVM's heap after a full collection."""
    java: Any = spark._jvm
    java.java.lang.System.gc()
    runtime = java.java.lang.Runtime.getRuntime()
    return runtime.totalMemory() - runtime.freeMemory()


def main(systems: Mapping[str, System]) -> int:
    """Run one of these systems to the end of its input."""
    parser = argparse.ArgumentParser(description="Run one system to the end of its input.")
    parser.add_argument("system", choices=systems)
    for name in ("inputs", "work", "result"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    spark = spark_session(f"local[{CORES}]", {**SPARK, "spark.local.dir": str(options.work / "spark")}, steps=True)
    steps = systems[options.system](spark, options.inputs, options.work)
    found = {"steps": steps, "live_heap_bytes": live_heap_bytes(spark)}
    options.result.write_text(json.dumps(found))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
