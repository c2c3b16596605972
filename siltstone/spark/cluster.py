"""Refuse settings that would lose rows or state if a stream's tasks run on machines that share no disk."""

from typing import Any

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.sinks.parquet import ParquetSink
from siltstone.sinks.resolve import resolve_sinks
from siltstone.spark.masters import is_local
from siltstone.stream import Stream

CACHED_IDLE = "spark.dynamicAllocation.cachedExecutorIdleTimeout"


def check_cluster(spark: Any, stream: Stream, warehouse: OpenWarehouse) -> None:
    """Check that all machines of the session's master can use a stream's sinks and catalog.

    Args:
        spark: a session with its driver in this process; a Spark Connect session runs no stream and is not checked.

    Raises:
        UsageError: a sink writes to one machine, the catalog is a local file, two attempts of a task may run at once,
            or executors that have state count as idle; nothing was changed.
    """
    master = spark.sparkContext.master
    if is_local(master):
        return
    where = f"stream {stream.name} would run on {master}, whose machines share no disk"
    for name, sink in resolve_sinks(stream, warehouse).items():
        if isinstance(sink, ParquetSink):
            raise UsageError(
                f"{where}: the rows of the ParquetSink of {name} would be spread over their disks. Give {name} a "
                "DeltaSink() or a function (rows, checkpoint) as its sink, or run on a local master "
                "(--master 'local[*]')"
            )
    if warehouse.catalog.url.startswith("sqlite"):
        raise UsageError(
            f"{where}: its catalog is a file on this one ({warehouse.catalog.url}), and the next run may be elsewhere. "
            "Name a database (--catalog postgresql://USER:PASSWORD@HOST/DATABASE), or run on a local master "
            "(--master 'local[*]')"
        )
    if _is_on(spark, "spark.speculation"):
        raise UsageError(
            f"{where}: with spark.speculation two of them may run one subtask at once: set spark.speculation to false"
        )
    if _is_on(spark, "spark.dynamicAllocation.enabled") and spark.conf.get(CACHED_IDLE, ""):
        raise UsageError(
            f"{where}: {CACHED_IDLE} would remove executors that have state between two micro-batches, which then "
            f"restore all of it: leave {CACHED_IDLE} unset, or set spark.dynamicAllocation.enabled to false"
        )


def _is_on(spark: Any, setting: str) -> bool:
    return spark.conf.get(setting, "false").lower() == "true"
