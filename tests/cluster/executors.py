"""The executors that a session has now."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession


def executor_hosts(spark: SparkSession) -> list[str]:
    """List the host of each living executor."""
    return sorted(host for _, host in _executors(spark))


def decommissioned_hosts(spark: SparkSession) -> list[str]:
    """List the host of each living executor that gets no more tasks, because it is being decommissioned."""
    scheduler = _context(spark).taskScheduler()
    found = [host for number, host in _executors(spark) if scheduler.getExecutorDecommissionState(number).isDefined()]
    return sorted(found)


def _executors(spark: SparkSession) -> Iterator[tuple[str, str]]:
    """Yield the id and the host of each living executor."""
    executors = _context(spark).statusStore().executorList(True)
    for each in map(executors.apply, range(executors.size())):
        if each.id() != "driver":
            yield each.id(), each.hostPort().rpartition(":")[0]


def _context(spark: SparkSession) -> Any:
    context: Any = spark.sparkContext
    return context._jsc.sc()
