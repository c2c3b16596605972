"""The settings of the Spark session: they arrive as they were given, and no list of processes shows them."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_settings_of_sparks_own_file_arrive_too_and_ours_go_first(tmp_path: Path) -> None:
    """Spark reads no other file where it is given one; before 4.0 it cannot be told to read both."""
    theirs = b"# r\xe9glages\nspark.own    a b  \nspark.both theirs\nspark.path C:\\dir\\"  # it takes the next line
    (tmp_path / "spark-defaults.conf").write_bytes(theirs)
    code = (
        "from siltstone.spark.session import spark_session\n"
        "spark = spark_session('local[1]', {'spark.both': 'ours', 'spark.given': 'c'})\n"
        "print([spark.conf.get('spark.' + name) for name in ('own', 'both', 'given')])"
    )
    fresh = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=fresh | {"SPARK_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines()[-1] == "['a b', 'ours', 'c']"
