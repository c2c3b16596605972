"""The cluster of the tests: its machines share nothing, and nothing of it outlives the process that started it."""

import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.cluster.cluster import ROOT, Cluster, wait_until

STARTED = """
import sys
from pathlib import Path
from tests.cluster.cluster import Cluster
cluster = Cluster(Path(sys.argv[1])).__enter__()
cluster.add_worker("127.0.0.4")
print("started", flush=True)
sys.stdin.read()
"""


def _named(path: Path) -> list[Path]:
    """The processes whose arguments name a path."""
    found = [each for each in Path("/proc").glob("[0-9]*/cmdline") if _reads(each, path)]
    return [each.parent for each in found]


def _reads(arguments: Path, path: Path) -> bool:
    try:
        return str(path).encode() in arguments.read_bytes()
    except OSError:
        return False


def test_nothing_outlives_a_process_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTED, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    private = tmp_path / "private"
    assert _named(private) and not list(private.iterdir()), "the worker's files are in its own tmpfs"
    process.kill()
    process.communicate()
    wait_until(lambda: not _named(private), "the end of the worker")
    assert len(cluster.workers) == 2 and all(list(worker.processes()) for worker in cluster.workers)


def test_each_machine_has_files_and_processes_of_its_own(cluster: Cluster, cluster_spark: SparkSession) -> None:
    private = cluster.private

    def look(_: object) -> list[tuple[str, bool]]:
        import socket

        seen = (private / "seen").exists()
        (private / "seen").touch()
        return [(f"{(private).stat().st_dev} {socket.gethostname()}", seen)]

    # Two tasks at once on two cores: one per worker.
    machines = cluster_spark.sparkContext.parallelize(range(2), 2).mapPartitions(look).collect()
    assert len(dict(machines)) == 2 and not any(seen for _, seen in machines)
    assert not (private / "seen").exists()
