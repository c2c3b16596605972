"""What Spark's worker processes do besides our tasks."""

import gc
import os

from pyspark.sql import SparkSession

from siltstone.spark.executor import spark_map

IMPORTED = 50_000
"""objects that a worker has at least, once it has imported pyarrow and Siltstone"""


def test_a_worker_leaves_what_it_imported_out_of_garbage_collection(spark: SparkSession) -> None:
    """Else PySpark, which collects garbage after each task, goes through all of it each time."""
    seen: set[int] = set()
    while True:
        [(worker, frozen)] = spark_map(spark, lambda _: (os.getpid(), gc.get_freeze_count()), [0])
        if worker in seen:  # it has had a task before
            break
        seen.add(worker)
    assert frozen > IMPORTED
