"""The executors that a session has now."""

from typing import Any

from pyspark.sql import SparkSession


def executor_hosts(spark: SparkSession) -> list[str]:
    """List the host of each living executor."""
    context: Any = spark.sparkContext
    executors = context._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(n) for n in range(executors.size())]
    return sorted(each.hostPort().rpartition(":")[0] for each in found if each.id() != "driver")
