"""What fails inside Spark ends in one line of our own, which names the file, and is tried again only if it may pass."""

import gzip
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count
from siltstone.errors import StateError
from siltstone.spark.executor import spark_map
from siltstone.spark.failures import may_pass
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
