"""The settings of the Spark session: they arrive as they were given, and no list of processes shows them."""

import subprocess

from pyspark.sql import SparkSession

from tests.jvm import PLANTED_SETTINGS


def test_settings_arrive_and_are_not_among_the_arguments_of_the_jvm(spark: SparkSession) -> None:
    assert {name: spark.conf.get(name) for name in PLANTED_SETTINGS} == PLANTED_SETTINGS
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.sparkContext.appName == "siltstone" and spark.sparkContext.master == "local[2]"
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    listed = subprocess.check_output(["ps", "-ww", "-o", "args=", "-p", str(gateway.proc.pid)], text=True)
    assert "pyspark-shell" in listed and "pl4nted" not in listed
