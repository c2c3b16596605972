"""What fails inside Spark ends in one line of our own."""

import os
import signal

import pytest
from pyspark.sql import SparkSession

from siltstone.errors import StateError
from siltstone.spark.executor import spark_map
from siltstone.spark.session import needs_spark


def test_a_worker_that_is_killed_fails_an_operation_in_one_line(spark: SparkSession) -> None:
    @needs_spark
    def operation() -> None:
        spark_map(spark, lambda _: os.kill(os.getpid(), signal.SIGKILL), [1])

    with pytest.raises(StateError, match=r"^Spark failed: a Python worker died.*run the same command again") as failed:
        operation()
    assert "\n" not in str(failed.value)
