"""What fails inside Spark ends in one line of our own, which names the file, and is tried again only if it may pass."""

import gzip
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count
from siltstone.errors import StateError
from siltstone.spark.executor import spark_map
from siltstone.spark.failures import may_pass, read_causes
from siltstone.spark.operations import RunRequest, run
from siltstone.spark.session import needs_spark
from siltstone.spark.versions import has_python_sources
from siltstone.stream import Stream
from tests.spark_runs import at


def test_a_worker_that_is_killed_fails_an_operation_in_one_line(spark: SparkSession) -> None:
    @needs_spark
    def operation() -> None:
        spark_map(spark, lambda _: os.kill(os.getpid(), signal.SIGKILL), [1])

    with pytest.raises(StateError, match=r"^Spark failed: a Python worker died.*run the same command again") as failed:
        operation()
    assert "\n" not in str(failed.value)


def test_a_connection_that_breaks_below_java_s_channels_may_pass(spark: SparkSession) -> None:
    """Java gives it no class of its own, and Spark talks to its workers in that way from 4.1 on."""
    jvm: Any = spark._jvm
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = jvm.java.net.InetSocketAddress("127.0.0.1", server.getsockname()[1])
        channel = jvm.java.nio.channels.SocketChannel.open(address)
        server.accept()[0].close()
        with pytest.raises(Py4JJavaError) as failed:
            for _ in range(100):
                channel.write(jvm.java.nio.ByteBuffer.allocate(1 << 20))
    (*_, cause) = read_causes(failed.value)
    assert cause.name == "java.io.IOException" and cause.of_connection
    assert may_pass(failed.value)
    with pytest.raises(Py4JJavaError) as failed:
        jvm.java.io.FileInputStream("/proc/self/mem").read()
    (*_, cause) = read_causes(failed.value)
    assert cause.name == "java.io.IOException" and not cause.of_connection, "that is a disk's"


def cut_gzip(directory: Path) -> Path:
    whole = gzip.compress(b"".join(b'{"k":"a","v":%d}\n' % n for n in range(20_000)))
    (directory / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    return directory / "cut.json.gz"


def cut_parquet(directory: Path) -> Path:
    pq.write_table(pa.table({"k": ["a"] * 1000, "v": list(range(1000))}), directory / "cut.parquet")
    data = (directory / "cut.parquet").read_bytes()
    (directory / "cut.parquet").write_bytes(data[: len(data) // 2])
    return directory / "cut.parquet"


def other_types(directory: Path) -> Path:
    pq.write_table(pa.table({"k": [1, 2], "v": ["x", "y"]}), directory / "other.parquet")
    return directory / "other.parquet"


def not_json(directory: Path) -> Path:
    (directory / "not.json").write_text("FetchFailed\n")
    return directory / "not.json"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (cut_gzip, "EOFException: Unexpected end of input stream"),
        (cut_parquet, "is not a Parquet file"),
        (other_types, "column: [k], physicalType: INT64, logicalType: string"),
        (not_json, "Unrecognized token 'FetchFailed'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason_and_read_once(
    tmp_path: Path, spark: SparkSession, make: Callable[[Path], Path], reason: str
) -> None:
    (tmp_path / "in").mkdir()
    file = make(tmp_path / "in")

    def source(session: SparkSession, options: Mapping[str, str]) -> DataFrame:
        reader = session.readStream.schema("k string, v long").option("mode", "FAILFAST")
        return reader.format(file.name.split(".")[1]).load((tmp_path / "in").as_uri())

    stream = Stream("files", source, [Aggregate("counts", {"k": pa.string()}, [Count("n")])])
    with pytest.raises(StateError) as failed:
        run(at(tmp_path / "w"), stream, RunRequest())
    said = str(failed.value)
    assert said.startswith("stream files stopped in step 1: ") and reason in said and "\n" not in said
    if has_python_sources(spark):  # before 4.0, Spark names the file of some failures only
        assert f"{file.as_uri()} cannot be read: " in said
    assert not may_pass(failed.value)
