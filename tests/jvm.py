"""What the JVMs of a test run start with. Each lives for seconds, so starting is most of what it costs: compiling
lightly, collecting simply, and mapping Spark's classes from an archive (Java's class data sharing) halve that. Room
from the start saves collections while classes load, and expressions that are interpreted need no Java class compiled
for each query: a fifth of what a run of some batches costs.

    python -m tests.jvm    makes the archive; without it tests do the same, more slowly
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_ROOM = "-XX:MetaspaceSize=256m -Xmn192m"
_INTERPRETED = "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
_QUIET = "-Xlog:disable"
"""an archive of another Java or of another Spark is passed over without a word"""
PLANTED_SETTINGS = {
    "spark.hadoop.fs.s3a.secret.key": "pl4nted secret: key=a\\b #c!é",
    "spark.odd = name": "pl4nted\tvalue",
    "of.another.kind": "pl4nted",
}
"""settings of the Spark session that are secret, or hard to write down; see tests/spark/test_session.py"""


def environment() -> dict[str, str]:
    """Variables with which a process starts such JVMs, and those it starts do."""
    shared = f" {_QUIET} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else ""
    return {
        "SPARK_SUBMIT_OPTS": f"{_SHORT_LIVED} {_ROOM} {_INTERPRETED}{shared}",
        "SPARK_LAUNCHER_OPTS": _SHORT_LIVED,
    }


def java() -> str:
    """Return the command that starts a JVM."""
    return str(Path(os.environ["JAVA_HOME"]) / "bin" / "java") if "JAVA_HOME" in os.environ else "java"


def main() -> None:
    """Load what tests load, by commands of every sort on a small stream, and archive it."""
    os.environ["SPARK_SUBMIT_OPTS"] = f"{_SHORT_LIVED} {_INTERPRETED} {_QUIET} -XX:ArchiveClassesAtExit={ARCHIVE}"
    os.environ["SILTSTONE_STREAMS"] = json.dumps(["tests.fault.small_stream"])
    from pyspark import SparkContext

    from siltstone import cli
    from siltstone.spark.session import running_session

    ARCHIVE.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as warehouse:
        for command in ("run small --batches 2", "verify small", "snapshot small", "materialize small"):
            sys.argv = ["siltstone", *command.split(), "--warehouse", warehouse, "--json"]
            try:
                cli.main()
            except SystemExit as ended:
                if ended.code:
                    raise
        session, gateway = running_session(), SparkContext._gateway
        assert session is not None and gateway is not None and gateway.proc is not None
        session.stop()
        gateway.proc.communicate()  # it ends with its input, and then writes the archive


if __name__ == "__main__":
    main()
