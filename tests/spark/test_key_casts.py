"""Keys are cast only if no two become one, and alike in every session; other columns are refused at the start."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count
from siltstone.errors import UsageError
from siltstone.run.inputs import HASH
from siltstone.run.local_step import split_rows
from siltstone.settings import Settings
from siltstone.spark.inputs import columns_read, keyed_rows
from siltstone.spark.operations import RunRequest, run, verify
from siltstone.stream import Stream
from tests.arrow_frames import to_arrow
from tests.examples import usually
from tests.property.test_dead_letter_laws import task_of
from tests.spark_runs import state
from tests.spark_streams import write_files

ZONES = ("UTC", "America/New_York", "Asia/Kathmandu")
CASTS: list[tuple[str, pa.DataType, Mapping[str, Any]]] = [
    (
        "double",
        pa.int64(),
        {
            "2.0": 2,
            "1.25": None,
            "1.9999": None,
            "-0.5": None,
            "'NaN'": None,
            "1e19": None,
            "9223372036854775807": None,
        },
    ),
    ("double", pa.uint64(), {"5": "5", "1152921504606846976": None, "-1": "-1"}),
    ("double", pa.decimal128(20, 0), {"9007199254740992": "9007199254740992", "18446744073709551616": None}),
    ("float", pa.int64(), {"16777216": 16777216, "1e18": None}),
    ("double", pa.int32(), {"-7.0": -7, "4294967301.0": None}),
    ("double", pa.float32(), {"0.5": 0.5, "0.1": None, "'Infinity'": float("inf"), "1e300": None}),
    ("float", pa.float64(), {"0.5": 0.5}),
    ("bigint", pa.int32(), {"5": 5, "4294967301": None}),
    ("bigint", pa.float64(), {"9007199254740992": 2.0**53, "9007199254740993": None, "9223372036854775807": None}),
    ("int", pa.float32(), {"16777216": 2.0**24, "16777217": None}),
    ("int", pa.decimal128(4, 2), {"12": "12.00", "123": None}),
    ("decimal(10,4)", pa.int64(), {"3": 3, "1.7500": None}),
    ("decimal(10,4)", pa.decimal128(10, 0), {"3": "3", "1.5000": None}),
    ("decimal(10,4)", pa.decimal128(20, 6), {"1.75": "1.750000"}),
    ("decimal(20,0)", pa.float64(), {"9007199254740993": None, "9007199254740992": 2.0**53}),
    ("string", pa.int64(), {"'1'": 1, "'01'": None, "' 1 '": None, "'1.0'": None, "'1e2'": None, "'abc'": None}),
    ("string", pa.bool_(), {"'true'": True, "'yes'": None}),
]
REFUSED = [
    ("timestamp", pa.date32()),
    ("timestamp", pa.string()),
    ("timestamp_ntz", pa.date32()),
    ("date", pa.timestamp("us")),
    ("string", pa.timestamp("us")),
    ("string", pa.float64()),
    ("string", pa.decimal128(10, 2)),
    ("int", pa.string()),
    ("double", pa.bool_()),
    ("boolean", pa.int32()),
    ("struct<a: int>", pa.string()),
    ("binary", pa.string()),
    ("string", pa.binary()),
]


def counts_by(kind: pa.DataType) -> Aggregate:
    return Aggregate("counts", {"key": kind}, [Count("n")])


def cast_locally(rows: pa.Table, operator: Aggregate) -> list[Any]:
    """The keys of rows that are split without Spark."""
    parts = split_rows({"source": rows}, task_of(operator))
    return [key for batches in parts.values() for batch in batches for key in batch.column("key").to_pylist()]


@pytest.mark.parametrize("ansi", ["true", "false"])
@pytest.mark.parametrize(("given", "declared", "values"), CASTS)
def test_a_key_is_cast_if_it_stays_the_same(
    spark: SparkSession, ansi: str, given: str, declared: pa.DataType, values: Mapping[str, Any]
) -> None:
    """Without ANSI, `cast` makes 5 of 2**32 + 5, and 1 of "1.7"; with it, 1 of 1.7."""
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", ansi)
    operator = counts_by(declared)
    operator.combined = None
    aside = task_of(operator)
    stops = replace(aside, dead_letters=None)
    for value, expected in values.items():
        rows = session.sql(f"SELECT cast({value} AS {given}) AS key")
        [[key, *_]] = keyed_rows(rows, aside).select("key").collect()
        assert (str(key) if isinstance(key, Decimal) else key) == expected, value
        if declared != pa.uint64():  # which refuses a negative key only later
            assert cast_locally(to_arrow(rows), operator) == [key], "as siltstone.testing does"
        if expected is None:
            said = re.escape(f'OperatorFailed: operator counts: key column key cannot be cast to {declared}: {{"key":')
            with pytest.raises((PySparkException, Py4JError), match=said):
                keyed_rows(rows, stops).collect()
        else:
            assert (
                keyed_rows(rows, stops).select("key", HASH).collect()
                == keyed_rows(rows, aside).select("key", HASH).collect()
            )


@pytest.mark.parametrize(("given", "declared"), REFUSED)
def test_a_cast_that_would_make_one_of_two_is_refused_before_anything_runs(
    spark: SparkSession, given: str, declared: pa.DataType
) -> None:
    rows = spark.sql(f"SELECT cast(null AS {given}) AS key")
    said = r"counts: key column key is .* in source, and .* where it is declared: "
    with pytest.raises(UsageError, match=said):
        columns_read(rows, counts_by(declared))
    operator = counts_by(declared)
    operator.combined = None
    with pytest.raises(UsageError, match=said):
        cast_locally(to_arrow(rows), operator)


def test_text_that_is_compared_by_a_collation_is_refused(spark: SparkSession) -> None:
    if not hasattr(spark.sql("SELECT 'a'").schema[0].dataType, "collation"):
        pytest.skip("before 4.0, Spark has no collations")
    for collation in ("UTF8_LCASE", "UNICODE_CI_AI"):
        with pytest.raises(UsageError, match=f"is text of the collation {collation}, by which several texts are equal"):
            columns_read(spark.sql(f"SELECT 'a' COLLATE {collation} AS key"), counts_by(pa.string()))
    columns_read(spark.sql("SELECT 'a' COLLATE UTF8_BINARY AS key"), counts_by(pa.string()))


@pytest.mark.parametrize(
    ("zone", "given", "map_side"),
    usually(
        product([None, "UTC", "Europe/Paris"], ["timestamp", "timestamp_ntz"], [True, False]),
        (None, "timestamp", False),
        ("UTC", "timestamp_ntz", True),
        ("Europe/Paris", "timestamp", True),
        ("Europe/Paris", "timestamp_ntz", False),
    ),
)
def test_an_instant_is_one_key_in_every_zone(
    spark: SparkSession, tmp_path: Path, given: str, zone: str | None, map_side: bool
) -> None:
    """Also in the hour that a clock shows twice."""
    times = [datetime(2024, 11, 3, hour, 30) for hour in (5, 6)] + [datetime(2024, 3, 10, 7, 30), datetime(1, 1, 1)]
    kind = pa.timestamp("us", "UTC" if given == "timestamp" else None)
    write_files(tmp_path / "files", [pa.table({"at": pa.array(times, kind)})])

    def source(session: SparkSession, options: Mapping[str, str]) -> DataFrame:
        return session.readStream.schema(f"at {given}").parquet((tmp_path / "files").as_uri())

    found, before = set(), str(spark.conf.get("spark.sql.session.timeZone"))
    for session_zone in ZONES:
        spark.conf.set("spark.sql.session.timeZone", session_zone)
        try:
            counts = Aggregate("counts", {"at": pa.timestamp("us", zone)}, [Count("n")], map_side=map_side)
            settings = Settings(warehouse=str(tmp_path / session_zone.replace("/", "-")), parallelism=2)
            result = run(settings, Stream("counts", source=source, operators=[counts], max_parallelism=8), RunRequest())
            assert verify(settings, "counts", every=True).failed == []
            rows = state(settings, "counts", "counts", "totals", tmp_path / f"state-{len(session_zone)}")
        finally:
            spark.conf.set("spark.sql.session.timeZone", before)
        assert sorted(at.cast(pa.timestamp("us", "UTC")).as_py() for at in rows["at"]) == sorted(
            time.replace(tzinfo=UTC) for time in times
        )
        found.add(result.digest)
    assert len(found) == 1
