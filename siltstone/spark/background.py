"""The units of a background materialization as Spark jobs that leave the stream its cores.

A job has no more tasks than half of the cores: all of them run at once, and none ever waits in front of a step's. So a
step waits for no more than the units that run when it begins, on half of the cores, whatever the scheduler's mode.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from siltstone.chains.materialize import MaterializedPart, MaterializeTask
from siltstone.spark.executor import spark_map


class SparkUnits:
    """Maps over units on Spark, few at a time; `cancel` ends that, from any thread."""

    def __init__(self, spark: SparkSession, stream: str) -> None:
        self._spark = spark
        self._stream = stream
        self._group = f"siltstone-materialize-{uuid.uuid4().hex}"
        self._cancelled = False

    def __call__(
        self, function: Callable[[MaterializeTask], MaterializedPart], tasks: Sequence[MaterializeTask]
    ) -> list[MaterializedPart]:
        """`function` of every unit, in order.

        Raises:
            SiltstoneError: the first that a unit raised.
            RuntimeError: it was cancelled.
        """
        context = self._spark.sparkContext
        context.setJobGroup(self._group, f"materializes {self._stream}")
        at_once = max(1, context.defaultParallelism // 2)
        done: list[MaterializedPart] = []
        for start in range(0, len(tasks), at_once):
            if self._cancelled:
                raise RuntimeError("cancelled")
            done += spark_map(self._spark, function, tasks[start : start + at_once])
        return done

    def cancel(self) -> None:
        """End what is under way, and all to come."""
        self._cancelled = True
        with suppress(Py4JError, OSError):  # then the JVM is gone, and its jobs with it
            self._spark.sparkContext.cancelJobGroup(self._group)
