"""Run the units of a background materialization as Spark jobs that leave the stream at least half of the cores.

A job has at most half as many tasks as there are cores, so all its tasks run at once and none queues before a step's. A
step therefore waits at most for the units that run when it begins, whatever the scheduler's mode.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from siltstone.chains.materialize import MaterializedPart, MaterializeTask
from siltstone.spark.executor import spark_map
from siltstone.store.open import Warehouse


class SparkUnits:
    """Maps a function over units on Spark, few at a time. `cancel` ends it, from any thread."""

    def __init__(self, spark: SparkSession, stream: str, warehouse: Warehouse) -> None:
        self._spark, self._warehouse = spark, warehouse
        self._stream = stream
        self._group = f"siltstone-materialize-{uuid.uuid4().hex}"
        self._cancelled = False

    def __call__(
        self, function: Callable[[MaterializeTask], MaterializedPart], tasks: Sequence[MaterializeTask]
    ) -> list[MaterializedPart]:
        """Call `function` for every unit and return the results in order.

        Raises:
            SiltstoneError: the first error of a unit.
            RuntimeError: `cancel` was called.
        """
        context = self._spark.sparkContext
        context.setJobGroup(self._group, f"materializes {self._stream}")
        at_once = max(1, context.defaultParallelism // 2)
        done: list[MaterializedPart] = []
        for start in range(0, len(tasks), at_once):
            if self._cancelled:
                raise RuntimeError("cancelled")
            done += spark_map(self._spark, function, tasks[start : start + at_once], on=self._warehouse)
        return done

    def cancel(self) -> None:
        """Cancel the running job, and start no other."""
        self._cancelled = True
        with suppress(Py4JError, OSError):  # the JVM has ended, and its jobs with it
            self._spark.sparkContext.cancelJobGroup(self._group)
