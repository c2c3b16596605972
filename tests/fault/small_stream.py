"""A small stream for tests that kill and corrupt: every kind of state, two chained operators, an aggregate, a sink.

    source -> accounts (account) -> places (place)
           '> daily (place, day)

Its source is a directory of Parquet files that it makes itself, the same on every machine, a micro-batch a file.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from siltstone.aggregates.operator import Aggregate, Count, Last, Max, Sum
from siltstone.operator import ListState, MapState, OpaqueState, Operator, Rows, State, ValueState, WindowState
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIME = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        ("sequence", pa.int64()),
        ("event_time", TIME),
        ("account", pa.string()),
        ("place", pa.int64()),
        ("day", pa.int64()),
        ("amount", pa.int64()),
    ]
)
PURCHASE = pa.schema([f for f in SCHEMA if f.name != "day"] + [pa.field("spent", pa.int64())])
FILES = 24
ROWS_A_FILE = 300
ACCOUNTS, PLACES = 80, 20
WINDOW = timedelta(hours=6)
_FIRST = datetime(2020, 1, 1, tzinfo=UTC)


class Accounts(Operator):
    """What every account has spent; hands on each purchase with what its account has spent up to it."""

    name = "accounts"
    key = {"account": pa.string()}  # noqa: RUF012
    inputs = tuple(name for name in PURCHASE.names if name not in ("account", "spent"))
    order_by = ("sequence",)
    output = PURCHASE

    totals = ValueState(value={"purchases": pa.int64(), "spent": pa.int64(), "last_seen": TIME, "note": pa.string()})
    recent = WindowState(value={"event_time": TIME, "amount": pa.int64()}, order="event_time")
    visited = MapState(key={"place": pa.int64()}, value={"purchases": pa.int64()})
    amounts = OpaqueState(
        create=lambda: np.zeros(8, "<i8"),
        serialize=np.ndarray.tobytes,
        deserialize=lambda b: np.frombuffer(b, "<i8").copy(),
    )

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Take purchases in order."""
        amount = rows.table["amount"].fill_null(0)
        old = state.totals.get(rows.keys)
        spent = rows.running(amount, initial=old["spent"])
        purchases, last_seen = rows.count(initial=old["purchases"]), rows.last("event_time")
        state.totals.put(
            rows.keys,
            {
                "purchases": purchases,
                "spent": rows.last(spent),
                "last_seen": last_seen,
                "note": pa.array(
                    [None if n % 3 else "every third" * (n % 5) for n in purchases.to_pylist()], pa.string()
                ),
            },
        )
        state.recent.insert(rows.keys, rows.key_index, rows.table.select(["event_time", "amount"]))
        state.recent.evict(rows.keys, pc.subtract(last_seen, WINDOW))
        visits = rows.by("place")
        had = state.visited.get(visits.keys.columns)
        state.visited.put(visits.keys.with_columns({"purchases": visits.count(initial=had["purchases"])}))
        for key_group in np.unique(rows.key_groups):
            own = amount.to_numpy()[rows.key_groups == key_group]
            state.amounts[key_group] += np.bincount(own % 8, minlength=8)
        return pa.table([*(rows.table.column(n) for n in PURCHASE.names[:-1]), spent], schema=PURCHASE)


class Places(Operator):
    """Who spends most in every place, and all large purchases there."""

    name = "places"
    key = {"place": pa.int64()}  # noqa: RUF012
    reads = "accounts"
    inputs = ("sequence", "account", "amount", "spent")
    order_by = ("sequence",)

    best = ValueState(value={"account": pa.string(), "spent": pa.int64()})
    large = ListState(value={"sequence": pa.int64(), "account": pa.string(), "amount": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Take purchases in order."""
        spent = rows.table["spent"]
        top = rows.max(spent)
        old = state.best.get(rows.keys)
        better = pc.greater(top, pc.fill_null(old["spent"], 0))
        first = rows.last("account", by=(spent, -np.arange(len(rows))))
        new = {"account": pc.if_else(better, first, old["account"]), "spent": rows.max(spent, initial=old["spent"])}
        state.best.put(rows.keys, new)
        large = np.flatnonzero(rows.table["amount"].fill_null(0).to_numpy() > 80)
        entries = rows.table.select(["sequence", "account", "amount"]).take(pa.array(large))
        state.large.append(rows.keys, rows.key_index[large], entries)


DAILY = Aggregate(
    "daily",
    key={"place": pa.int64(), "day": pa.int64()},
    aggregates=[
        Count("purchases"),
        Sum("spent", of="amount"),
        Max("most", of="amount"),
        Last("last_account", of="account", type=pa.string(), by="sequence", by_type=pa.int64()),
    ],
    output=False,
)


def purchases() -> list[pa.Table]:
    """The whole input, a table a file."""
    random = np.random.default_rng(17)
    tables = []
    for number in range(FILES):
        sequence = np.arange(ROWS_A_FILE) + number * ROWS_A_FILE
        seconds = sequence * 60 + random.integers(0, 60, ROWS_A_FILE)
        # Few accounts in each file, and others in the next: a delta is then much smaller than a base.
        account = (random.integers(0, ACCOUNTS // 4, ROWS_A_FILE) + number * 7) % ACCOUNTS
        columns = [
            pa.array(sequence),
            pa.array(np.datetime64(_FIRST.replace(tzinfo=None), "us") + seconds.astype("timedelta64[s]"), TIME),
            pa.array([f"account {n:04d}" for n in account]),
            pa.array(random.integers(0, PLACES, ROWS_A_FILE)),
            pa.array(seconds // 86_400),
            pa.array(random.integers(0, 100, ROWS_A_FILE), mask=random.random(ROWS_A_FILE) < 0.05),
        ]
        tables.append(pa.table(columns, schema=SCHEMA))
    return tables


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """The purchases, a micro-batch a file."""
    from pyspark.sql.pandas.types import from_arrow_schema

    directory = Path(options["directory"]) / "purchases"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".purchases-", dir=directory.parent))
        for number, table in enumerate(purchases()):
            path = building / f"{number:05d}.parquet"
            pq.write_table(table, path)
            os.utime(path, times=(_FIRST.timestamp() + number, _FIRST.timestamp() + number))
        try:
            building.rename(directory)
        except OSError:  # another run was faster; its files are the same
            shutil.rmtree(building)
    reader = spark.readStream.schema(from_arrow_schema(SCHEMA)).option("maxFilesPerTrigger", 1)
    return reader.parquet(directory.absolute().as_uri())


SMALL = Stream(
    "small",
    source=source,
    operators=[Accounts(), DAILY, Places()],
    event_time="event_time",
    sinks={"accounts": ParquetSink()},
    max_parallelism=16,
)
