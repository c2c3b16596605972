"""Operators with timers, for tests: sessions that end after a gap, hours that count the sessions that ended in them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.keyed import KeyedProcessor
from siltstone.operator import Due, Operator, Rows, State, Timer, ValueState
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime

TIME = pa.timestamp("us", "UTC")
CLICKS = pa.schema([("user", pa.int64()), ("at", TIME), ("from", pa.string())])
GAP, HOUR = timedelta(minutes=10), timedelta(hours=1)
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def clicks(*rows: tuple[int, float | None]) -> pa.Table:
    """Rows of (user, minutes after the beginning; None for no time)."""
    at = [None if minute is None else BEGIN + timedelta(minutes=minute) for _, minute in rows]
    return pa.table([[user for user, _ in rows], at, [f"p{user % 2}" for user, _ in rows]], schema=CLICKS)


def at(minute: float) -> datetime:
    """So many minutes after the beginning."""
    return BEGIN + timedelta(minutes=minute)


def values_of(rows: Rows, column: str) -> Any:
    """A column of all rows, of one input or of several."""
    if column in rows.table.column_names:
        return rows.table[column]
    return pc.coalesce(*(pc.struct_field(of, column) for of in rows.table.columns if pa.types.is_struct(of.type)))


class Sessions(Operator):
    """The clicks of each user until there is none for ten minutes."""

    name = "sessions"
    key = {"user": pa.int64()}  # noqa: RUF012
    output = pa.schema([("user", pa.int64()), ("clicks", pa.int64()), ("ended", TIME)])
    output_time = "ended"
    counts = ValueState({"clicks": pa.int64()})
    idle = Timer()

    def process(self, rows: Rows, state: State) -> None:
        old = state.counts.get(rows.keys)
        state.counts.put(rows.keys, {"clicks": rows.count(initial=old["clicks"])})
        newest = rows.max(values_of(rows, "at"), initial=pc.subtract(state.idle.get(rows.keys), pa.scalar(GAP)))
        state.idle.set(rows.keys, pc.add(newest, pa.scalar(GAP)))

    def on_timer(self, due: Due, state: State) -> pa.Table:
        made = state.counts.get(due.keys)
        state.counts.delete(due.keys)
        return due.keys.with_columns({"clicks": made["clicks"], "ended": due.at})


class SessionsByKey(KeyedProcessor):
    """The same, one key at a time."""

    name = "sessions"
    key = {"user": pa.int64()}  # noqa: RUF012
    output = Sessions.output
    output_time = "ended"
    counts = ValueState({"clicks": pa.int64()})
    idle = Timer()

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> None:
        old, ends = state.counts.get(), max(row["at"] for row in rows) + GAP
        state.counts.put({"clicks": len(rows) + (old["clicks"] if old else 0)})
        state.idle.set(max(filter(None, (ends, state.idle.get()))))

    def handle_timer(self, key: tuple[Any, ...], timer: str, at: datetime, state: Any) -> list[dict[str, Any]]:
        clicks = state.counts.get()["clicks"]
        state.counts.remove()
        return [{"user": key[0], "clicks": clicks, "ended": at}]


class Hours(Operator):
    """How many sessions have ended in each hour, once it is over: it reads what a timer has made."""

    name = "hours"
    reads = "sessions"
    key = {"hour": TIME}  # noqa: RUF012
    inputs = ("ended",)
    output = pa.schema([("hour", TIME), ("sessions", pa.int64())])
    sessions = ValueState({"sessions": pa.int64()})
    over = Timer()

    def process(self, rows: Rows, state: State) -> None:
        old = state.sessions.get(rows.keys)
        state.sessions.put(rows.keys, {"sessions": rows.count(initial=old["sessions"])})
        state.over.set(rows.keys, pc.add(rows.keys.columns["hour"], pa.scalar(HOUR)))

    def on_timer(self, due: Due, state: State) -> pa.Table:
        made = state.sessions.get(due.keys)
        state.sessions.delete(due.keys)
        return due.keys.with_columns({"sessions": made["sessions"]})


class Alarms(Operator):
    """Says of each user that it was quiet for a while of the day's time: a timer by the time of day."""

    name = "alarms"
    key = {"user": pa.int64()}  # noqa: RUF012
    output = pa.schema([("user", pa.int64()), ("at", TIME)])
    quiet = Timer("processing")
    AFTER = timedelta(seconds=2)

    def process(self, rows: Rows, state: State) -> None:
        state.quiet.set(rows.keys, state.clock.now + self.AFTER)

    def on_timer(self, due: Due, state: State) -> pa.Table:
        assert (np.array(due.at.to_pylist()) <= state.clock.now).all()
        return due.keys.with_columns({"at": due.at})


def sessions_of(rows: list[tuple[int, float]]) -> list[tuple[int, int, datetime]]:
    """The sessions in all rows, whatever their order: (user, clicks, when it ended), sorted."""
    found: list[tuple[int, int, datetime]] = []
    for user in {user for user, _ in rows}:
        times = sorted(at(minute) for one, minute in rows if one == user)
        begun = 0
        for number in range(1, len(times) + 1):
            if number == len(times) or times[number] > times[number - 1] + GAP:
                found.append((user, number - begun, times[number - 1] + GAP))
                begun = number
    return sorted(found)


def timed(name: str, source: Any = None, delay: str = "5 minutes", **options: Any) -> Stream:
    """A stream of sessions."""
    event_time = options.pop("event_time", EventTime("at", delay=delay, max_ahead=timedelta(days=36500)))
    return Stream(name, source, options.pop("operators", [Sessions()]), event_time=event_time, **options)
