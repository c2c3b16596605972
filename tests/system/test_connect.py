"""The operations on a real Spark Connect server, from processes that have no JVM of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyspark
import pytest

from tests.command_line import Ended, siltstone
from tests.fault import series
from tests.servers import free_port, wait_for_port

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_S, STOP_S = 300, 20
REPOSITORY = Path(__file__).parents[2]
Command = Callable[..., Ended]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    installed = Path(pyspark.__file__).parent
    if not list((installed / "jars").glob("spark-connect_*.jar")):
        pytest.skip("before 4.0, PySpark comes without a Connect server")
    port, submit = free_port(), installed / "bin" / "spark-submit"
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.defaultJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
        "spark.ui.enabled": "false",
    }
    command = [submit, "--class", SERVER, "--master", "local[2]"]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    environment |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port, process, START_S)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # a JVM whose parent ignores SIGTERM, as Dagster may make it do, does too
            process.kill()
            process.wait()


def command(project: Path, master: str) -> Command:
    """Runs a command in a process of its own."""

    def run(*arguments: object) -> Ended:
        done = subprocess.run(
            [sys.executable, "-m", "siltstone.cli", *map(str, arguments)],
            cwd=project,
            env=os.environ | {"SILTSTONE_MASTER": master, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


def one_after_the_other(project: Path, master: str, *lines: str) -> list[dict[str, Any]]:
    """What commands print that end well, in one process: each session of a server has workers of its own."""
    done = subprocess.run(
        [sys.executable, "-m", series.__name__, json.dumps([line.split() for line in lines])],
        cwd=project,
        env=os.environ | {"SILTSTONE_MASTER": master, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_state_is_proven_restored_consolidated_and_rescaled(six: Path, server: str) -> None:
    newest = siltstone("checkpoints", "little", "--json", cwd=six).json["checkpoints"][-1]
    verified, made, restored, rescaled, again = one_after_the_other(
        six,
        server,
        "verify little --all --json",
        "materialize little --json",
        "restore little --to restored --json",
        "rescale little --parallelism 3 --json",
        "restore little --json",
    )
    assert verified["proven"] == [1, 2, 3, 4, 5, 6]
    assert made["checkpoint"] == 6 and made["rows"] > 0
    assert (restored["proven"], restored["digest"]) == (True, newest["digest"])
    assert sum(ds.dataset(d).count_rows() for d in (six / "restored").rglob("*") if d.is_dir()) > 0
    assert rescaled["parallelism"] == 3
    assert again["digest"] == newest["digest"]
    assert siltstone("verify", "little", "--all", "--json", cwd=six).json["failed"] == []


def test_a_run_needs_spark_in_its_own_process(six: Path) -> None:
    ended = command(six, f"sc://127.0.0.1:{free_port()}")("run", "little")  # it does not even look for a server
    ended.failed(2, "Spark Connect", "local[*]")


def test_no_server_is_one_clear_error(six: Path) -> None:
    ended = command(six, f"sc://127.0.0.1:{free_port()}")("restore", "little")
    ended.failed(3, "no Spark Connect server answers", "start-connect-server.sh")
