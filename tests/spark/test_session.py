"""The settings of the Spark session: they arrive as they were given, and no list of processes shows them."""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("is_long", [False, True])
def test_workers_get_rows_by_private_sockets_that_are_gone_in_the_end(tmp_path: Path, is_long: bool) -> None:
    """By TCP where paths of temporary files are too long for a socket, and before 4.1."""
    temporary = tmp_path / ("long" * 20) if is_long else Path(tempfile.mkdtemp(dir="/tmp"))
    temporary.mkdir(exist_ok=True)
    code = (
        "import os, sys\n"
        "from siltstone.spark.session import socket_directory, spark_session\n"
        "before = set(os.listdir(sys.argv[1]))\n"
        "spark = spark_session('local[1]')\n"
        "rows = spark.range(3).mapInArrow(lambda batches: batches, 'id long').toPandas()\n"
        "directory = spark.conf.get('spark.python.unix.domain.socket.dir', None)\n"
        "mode = oct(os.stat(socket_directory()).st_mode & 0o777)\n"
        "print([len(rows), directory and directory.startswith(sys.argv[1]), mode, spark.version >= '4.1',\n"
        "       len(os.listdir(socket_directory())) > 0])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(temporary)],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
        | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    count, given, mode, knows, used = ast.literal_eval(told.stdout.splitlines()[-1])
    assert (count, bool(given), mode, used) == (3, not is_long, "0o700", knows and not is_long)
    assert not list(temporary.glob("siltstone-*"))
    shutil.rmtree(temporary)


def test_the_sockets_of_a_process_that_is_killed_are_removed_too() -> None:
    code = (
        "import os, signal\n"
        "from siltstone.spark.session import socket_directory, spark_session\n"
        "spark_session('local[1]').range(3).mapInArrow(lambda batches: batches, 'id long').count()\n"
        "print(socket_directory(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    fresh = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=fresh | {"TMPDIR": "/tmp"}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().decode().strip())
        assert process.wait() < 0 and directory.parent == Path("/tmp")
    until_s = time.monotonic() + 60
    while directory.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not directory.exists()


def test_a_forked_process_leaves_the_sockets_of_its_parent() -> None:
    code = (
        "import os, sys\n"
        "from siltstone.spark.session import socket_directory\n"
        "directory = socket_directory()\n"
        "if child := os.fork():\n"
        "    os.waitpid(child, 0)\n"
        "    print(os.path.isdir(directory), directory)\n"
    )
    there, directory = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert there == "True" and not Path(directory).exists()
