"""A month of purchases, a file a day and a micro-batch a file, through the operators of the small stream."""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.secret import Secret
from tests.fault import small_stream
from tests.fault.small_stream import ACCOUNTS, PLACES, SCHEMA, TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST = date(2020, 1, 1)
DAYS = 30
ROWS_A_DAY = 60
PARTITIONS = [str(FIRST + timedelta(days=n)) for n in range(DAYS)]


def purchases() -> list[pa.Table]:
    """The whole input, a table a day."""
    random = np.random.default_rng(30)
    tables = []
    for day in range(DAYS):
        sequence = np.arange(ROWS_A_DAY) + day * ROWS_A_DAY
        seconds = day * 86_400 + np.sort(random.integers(0, 86_400, ROWS_A_DAY))
        time = np.datetime64(FIRST, "s") + seconds.astype("timedelta64[s]")
        account = random.integers(0, ACCOUNTS // 4, ROWS_A_DAY) + day * 2
        columns = [
            pa.array(sequence),
            pa.array(time.astype("datetime64[us]"), TIME),
            pa.array([f"account {n:04d}" for n in account]),
            pa.array(random.integers(0, PLACES, ROWS_A_DAY)),
            pa.array(np.full(ROWS_A_DAY, day)),
            pa.array(random.integers(0, 100, ROWS_A_DAY)),
        ]
        tables.append(pa.table(columns, schema=SCHEMA))
    return tables


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """The purchases, a micro-batch a day."""
    from pyspark.sql.pandas.types import from_arrow_schema

    assert options["password"], "each run is given it"
    directory = Path(options["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    for day, table in enumerate(purchases()):
        path = directory / f"{day:05d}.parquet"
        if not path.exists():
            written = path.with_name(f".{path.name}")
            pq.write_table(table, written)
            at = (datetime(2020, 1, 1, tzinfo=UTC) + timedelta(days=day)).timestamp()
            os.utime(written, times=(at, at))
            written.rename(path)
    reader = spark.readStream.schema(from_arrow_schema(SCHEMA)).option("maxFilesPerTrigger", 1)
    return reader.parquet(directory.absolute().as_uri())


LIVE = replace(
    small_stream.SMALL,
    name="live",
    source=source,
    event_days=(FIRST, FIRST + timedelta(days=DAYS - 1)),
    options={"password": Secret("LIVE_PASSWORD")},
)
