"""Timers under Spark: they fire by the watermark and by the time of day, also where no row comes, and replay alike."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import BadRow, UsageError
from siltstone.operator import Rows
from siltstone.spark.operations import RunRequest, replay, rescale, run, stream_runner, write_stream
from siltstone.stream import DEAD_LETTERS, DIRECTORY, Stream
from siltstone.time.clock_rules import decode_clock
from siltstone.time.event_time import EventTime
from tests.spark_runs import at as settings_at
from tests.spark_runs import check_proven, state
from tests.spark_streams import source_of
from tests.timed_streams import Alarms, Hours, Sessions, SessionsByKey, at, clicks, sessions_of, timed

BATCHES = [
    [(1, 0), (2, 1), (1, 4)],
    [(1, 9), (3, 12), (2, 10)],
    [(3, 20), (6, 40), (4, 90)],
    [(5, 91), (1, 2), (4, 95)],
]
"""(user, minute); the last (1, 2) is late"""
LATE = (1, 2)
IN_TIME = [row for batch in BATCHES for row in batch if row != LATE]


class Got:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[Any, ...]]] = {}
        self.changed = threading.Condition()

    def __call__(self, rows: DataFrame, id: int) -> None:
        with self.changed:
            assert id not in self.rows
            self.rows[id] = [tuple(row) for row in rows.collect()]
            self.changed.notify_all()

    @property
    def all(self) -> list[tuple[Any, ...]]:
        return sorted(row for rows in self.rows.values() for row in rows)


class HoursOfSessions(Hours):
    """Takes the hour of a session's end as its key: the source of an operator has the key as a column."""


class SessionsWithHour(Sessions):
    """Sessions with the hour in which they ended."""

    output = pa.schema([*Sessions.output, ("hour", pa.timestamp("us", "UTC"))])

    def on_timer(self, due: Any, state: Any) -> pa.Table:
        made = super().on_timer(due, state)
        return made.append_column("hour", pc.floor_temporal(made["ended"], unit="hour"))


def plain(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows as Spark gives them, with times in UTC."""
    from datetime import UTC, datetime

    return sorted(tuple(v.astimezone(UTC) if isinstance(v, datetime) else v for v in row) for row in rows)


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step without rows between two batches, before which a slow machine has time for one."""
    monkeypatch.setattr("siltstone.spark.runner.TICK_S", float("inf"))


@pytest.mark.usefixtures("no_ticks")
@pytest.mark.parametrize("operator", [Sessions, SessionsByKey])
def test_sessions_end_by_the_watermark_and_all_at_the_end(spark: SparkSession, tmp_path: Path, operator: type) -> None:
    got = Got()
    stream = timed(
        "s", source_of([clicks(*batch) for batch in BATCHES]), sinks={"sessions": got}, operators=[operator()]
    )
    settings = settings_at(tmp_path / "w")
    done = run(settings, stream, RunRequest(finish=True))
    assert plain(got.all) == sessions_of(IN_TIME) and done.late == {"sessions": 1}
    for table in ("counts", "idle"):
        assert state(settings, "s", "sessions", table, tmp_path / table).num_rows == 0, "nothing timed is left"
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        steps = place.catalog.input_log.list("s", done.checkpoints[-1])
        clocks = [decode_clock(step.clock) for step in steps]
    assert [clock.sources["source"].watermark for clock in clocks[1:4]] == [
        int((at(minute - 5)).timestamp() * 1_000_000) for minute in (4, 12, 90)
    ]
    assert replay(settings, stream).proven
    check_proven(settings, "s")


def test_what_an_earlier_timer_made_sets_timers_of_an_operator_that_reads_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    got, hours = Got(), Got()
    stream = timed(
        "s",
        source_of([clicks(*batch) for batch in BATCHES]),
        operators=[SessionsWithHour(), HoursOfSessions()],
        sinks={"sessions": got, "hours": hours},
    )
    settings = settings_at(tmp_path / "w", checkpoint_steps=2)
    run(settings, stream, RunRequest(batches=2))
    rescale(settings, stream, 3)
    run(settings.model_copy(update={"parallelism": None}), stream, RunRequest(finish=True))
    ends = [ended.replace(minute=0) for *_, ended in sessions_of(IN_TIME)]
    assert plain(hours.all) == sorted(Counter(ends).items())
    assert replay(settings, stream).proven


def test_timers_by_the_time_of_day_fire_while_no_row_comes_and_replay_at_the_recorded_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    got, files, settings = Got(), tmp_path / "files", settings_at(tmp_path / "w")
    stream = Stream("a", None, [Alarms()], sinks={"alarms": got})
    source = source_of([clicks((1, 0), (2, 0))])
    rows = source(spark, {DIRECTORY: str(files)})
    with write_stream(settings, stream, rows, RunRequest()) as begun, got.changed:
        assert got.changed.wait_for(lambda: len(got.all) == 2 or not begun.is_active, timeout=60)
        assert begun.is_active
    assert [user for user, _ in got.all] == [1, 2]
    again = Stream(
        "a", lambda spark, options: source(spark, {DIRECTORY: str(files)}), [Alarms()], sinks={"alarms": got}
    )
    assert replay(settings, again).proven


@pytest.mark.usefixtures("no_ticks")
@pytest.mark.parametrize("on_bad_row", ["fail", "dead-letter"])
def test_late_rows_are_dead_letters_once_also_where_bad_rows_fail(
    spark: SparkSession, tmp_path: Path, on_bad_row: str
) -> None:
    got, letters = Got(), Got()
    stream = timed(
        "s",
        source_of([clicks(*batch) for batch in BATCHES]),
        sinks={"sessions": got, DEAD_LETTERS: letters},
        late="dead-letter",
        on_bad_row=on_bad_row,
    )
    settings = settings_at(tmp_path / "w")
    done = run(settings, stream, RunRequest(finish=True))
    assert plain(got.all) == sessions_of(IN_TIME)
    assert done.late == done.dead_letters == {"sessions": 1}
    [(operator, reason, row, *_)] = letters.all
    assert operator == "sessions" and "before the watermark 2026-03-01T00:07:00" in reason and '"user": 1' in row
    assert replay(settings, stream).proven


def test_a_row_without_a_time_or_far_ahead_is_bad(spark: SparkSession, tmp_path: Path) -> None:
    letters = Got()
    ahead = EventTime("at", max_ahead="1 day")
    now = clicks((1, None), (2, 60 * 24 * 36500), (3, 0))
    stream = timed("s", source_of([now]), event_time=ahead, on_bad_row="dead-letter", sinks={DEAD_LETTERS: letters})
    settings = settings_at(tmp_path / "w")
    run(settings, stream, RunRequest())
    reasons = sorted(reason for _, reason, *_ in letters.all)
    assert len(reasons) == 2 and "at is null" in reasons[0] and "too far ahead" in reasons[1]
    assert state(settings, "s", "sessions", "counts", tmp_path / "c")["user"].to_pylist() == [3]
    with pytest.raises(BadRow, match="event time at is null in 1 rows"):
        run(settings_at(tmp_path / "v"), timed("s", source_of([now]), event_time=ahead), RunRequest())


def test_rows_that_are_late_may_be_processed(spark: SparkSession, tmp_path: Path) -> None:
    got = Got()
    stream = timed("s", source_of([clicks(*batch) for batch in BATCHES]), sinks={"sessions": got}, late="process")
    done = run(settings_at(tmp_path / "w"), stream, RunRequest(finish=True))
    assert sum(clicks for _, clicks, _ in got.all) == len(IN_TIME) + 1 and done.late == {"sessions": 1}


def test_a_query_of_ones_own_must_be_awaited(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.spark.runner.AWAITED_WITHIN_S", 0.1)
    rows = source_of([clicks((1, 0))])(spark, {DIRECTORY: str(tmp_path / "files")})
    settings = settings_at(tmp_path / "w")
    with (
        pytest.raises(Exception, match="call it instead of"),
        stream_runner(settings, timed("s"), spark) as runner,
    ):
        query = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location).start()
        query.awaitTermination(60)


class Forever(Sessions):
    """Sets its timer again at once."""

    def process(self, rows: Rows, state: Any) -> None:
        state.idle.set(rows.keys, rows.max("at"))

    def on_timer(self, due: Any, state: Any) -> None:
        state.idle.set(due.keys, due.at)


def test_timers_that_are_set_again_for_ever_are_an_error(spark: SparkSession, tmp_path: Path) -> None:
    stream = timed("s", source_of([clicks((1, 0)), clicks((1, 20))]), operators=[Forever()])
    with pytest.raises(UsageError, match="no later for 1,000 rounds"):
        run(settings_at(tmp_path / "w"), stream, RunRequest(finish=True))
