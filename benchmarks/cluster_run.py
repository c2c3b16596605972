"""Run the stream of the cluster benchmark in a process of its own: `python -m benchmarks.cluster_run < ORDER`.

ORDER is JSON: the settings, the directory of input files, the most micro-batches, and the number of executors to wait
for. A line of JSON is printed for each completed checkpoint: its id, digest, and the time in seconds since the epoch.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from benchmarks.systems import source, totals_stream
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from siltstone.spark.session import spark_session
from tests.cluster.cluster import wait_until
from tests.cluster.executors import executor_hosts


def read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """Read the workload's files."""
    return source(spark, options["inputs"])


STREAM = replace(totals_stream("bench"), source=read, options={"inputs": ""})


def print_checkpoint(completed: Completed) -> None:
    """Report a checkpoint."""
    print(json.dumps({"id": completed.id, "digest": completed.digest, "completed_s": time.time()}), flush=True)


def main() -> int:
    """Run to the end of the input."""
    order = json.loads(sys.stdin.read())
    settings = Settings(**order["settings"])
    spark = spark_session(settings.master, settings.spark, steps=True)
    spark.sparkContext.setLogLevel("ERROR")
    wait_until(lambda: len(executor_hosts(spark)) == order["executors"], f"{order['executors']} executors")
    run(settings, STREAM, RunRequest(order["batches"], options={"inputs": order["inputs"]}), print_checkpoint)
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
