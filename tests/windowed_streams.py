"""Windows computed by hand, row by row, to compare with those of `Aggregate`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.functions import Average, Count, First, Last, Max, Min, Sum
from siltstone.aggregates.lists import CollectList, TopN
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Cumulative, Session, Sliding, Tumbling
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime

TIME = pa.timestamp("us", "UTC")
ROWS = pa.schema([("user", pa.int64()), ("at", TIME), ("v", pa.int64())])
FUNCTIONS = (
    Count("n"),
    Count("n_v", of="v"),
    Sum("total", of="v"),
    Sum("wrapped", of="v", on_overflow="wrap"),
    Sum("some", of="v", on_overflow="null"),
    Sum("floats", of="v", type=pa.float64()),
    Min("lo", of="v"),
    Max("hi", of="v"),
    Average("mean", of="v"),
    First("first", of="v", by="at"),
    Last("last", of="v", by="at"),
    ApproxDistinct("distinct", of="v", precision=14),
    CollectList("all", of="v"),
    CollectList("newest", of="v", by="at", distinct=True, limit=3),
    TopN("top", 2, by="v", of={"at": TIME}),
)
SPRING = datetime(2026, 3, 28, 20, tzinfo=UTC)
AUTUMN = datetime(2026, 10, 24, 20, tzinfo=UTC)
BERLIN = "Europe/Berlin"
MINUTE = timedelta(minutes=1)
CASES: dict[str, tuple[Any, datetime, timedelta]] = {
    "tumbling": (Tumbling("10 minutes", on="at"), SPRING, MINUTE),
    "offset": (Tumbling("10 minutes", on="at", offset="3 minutes"), SPRING, MINUTE),
    "sliding": (Sliding("20 minutes", "5 minutes", on="at"), SPRING, MINUTE),
    "uneven": (Sliding("10 minutes", "4 minutes", on="at"), SPRING, MINUTE),
    "cumulative": (Cumulative("20 minutes", "5 minutes", on="at"), SPRING, MINUTE),
    "session": (Session("6 minutes", on="at"), SPRING, MINUTE),
    "days": (Tumbling("1 day", on="at", zone=BERLIN), SPRING - timedelta(days=1), 60 * MINUTE),
    "days-sliding": (Sliding("2 days", "1 day", on="at", zone=BERLIN), AUTUMN - timedelta(days=2), 60 * MINUTE),
    "hours": (Tumbling("1 hour", on="at", zone=BERLIN), AUTUMN, 10 * MINUTE),
    "halves": (Sliding("1 hour", "30 minutes", on="at", zone=BERLIN), AUTUMN, 10 * MINUTE),
    "quarters": (Cumulative("1 hour", "15 minutes", on="at", zone=BERLIN), SPRING, 10 * MINUTE),
    "by-day": (Cumulative("1 day", "6 hours", on="at", zone=BERLIN), SPRING, 60 * MINUTE),
}
"""name -> the window, when rows begin, and the unit of their times"""
DELAY = 5
"""of their streams, in units"""
NEVER = datetime.min.replace(tzinfo=UTC)
Row = tuple[int, datetime, int | None]
Shown = tuple[int, datetime, datetime]
"""(user, window_start, window_end)"""


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Rows as a table."""
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.table([pa.array(part, f.type) for part, f in zip(columns, ROWS, strict=True)], schema=ROWS)


def windowed(window: Any, delay: timedelta, emit: str = "close", map_side: bool = False, **options: Any) -> Stream:
    """A stream of all functions over windows."""
    operator = Aggregate("a", {"user": pa.int64()}, FUNCTIONS, window=window, emit=emit, map_side=map_side)
    event_time = EventTime("at", delay=delay, max_ahead=timedelta(days=36500))
    return Stream(
        "s",
        None,
        options.pop("operators", [operator]),
        event_time=options.pop("event_time", event_time),
        sinks={"a": None},
        **options,
    )


@cache
def boundary(number: int, width: timedelta, offset: timedelta, zone: str | None) -> datetime:
    """The first moment at which clocks show `number` widths after 1970, or later."""
    shown = datetime(1970, 1, 1) + offset + number * width
    if zone is None:
        return shown.replace(tzinfo=UTC)
    there, step = ZoneInfo(zone), timedelta(minutes=15)
    moment = shown.replace(tzinfo=UTC) - timedelta(hours=30)
    while moment.astimezone(there).replace(tzinfo=None) < shown:
        moment += step
    return moment


@cache
def windows_of(window: Any, at: datetime) -> list[tuple[datetime, datetime]]:
    """The aligned windows that contain a time, by trying all around it."""
    every = window.size if isinstance(window, Tumbling) else window.every
    first = (at.replace(tzinfo=None) - datetime(1970, 1, 1) - window.offset) // window.size
    found = set()
    spans = range(1, window.size // every + 1) if isinstance(window, Cumulative) else [None]
    period = window.size if isinstance(window, Cumulative) else every
    around = 3 + max(1, timedelta(days=1) // period, window.size // period)
    middle = first * (window.size // period) if window.size % period == timedelta(0) else None
    middle = (at.replace(tzinfo=None) - datetime(1970, 1, 1) - window.offset) // period if middle is None else middle
    for number in range(middle - around, middle + around + window.size // period + 1):
        for span in spans:
            lasts = window.size if span is None else span * every
            start = boundary(number, period, window.offset, window.zone)
            end = boundary(0, period, window.offset + number * period + lasts, window.zone)
            if start <= at < end:
                found.add((start, end))
    return sorted(found)


def totals_of(rows: list[Row]) -> tuple[Any, ...]:
    """What the functions come to."""
    values = [v for _, _, v in rows if v is not None]
    total = sum(values) if values else None
    order = sorted((at, v) for _, at, v in rows if v is not None)
    mean = sum(values) / len(values) if values else None
    least, most = min(values, default=None), max(values, default=None)
    ends = (order[0][1], order[-1][1]) if order else (None, None)
    distinct = list(dict.fromkeys(v for _, v in order))
    top = [{"v": v, "at": at} for at, v in sorted(order, key=lambda row: (-row[1], row[0]))[:2]]
    lists = len(distinct), sorted(values), distinct[:3], top
    return (len(rows), len(values), total, total, total, total, least, most, mean, *ends, *lists)


@dataclass
class ByHand:
    """What windows should come to, step by step."""

    window: Any
    late: list[Row] = field(default_factory=list)
    windows: dict[Shown, list[Row]] = field(default_factory=dict)
    """those of aligned windows, and sessions that are over"""
    open: list[tuple[datetime, datetime, list[Row]]] = field(default_factory=list)

    def step(self, rows: Iterable[Row], before: datetime | None, watermark: datetime | None) -> None:
        """Take a step: W' and W."""
        for row in rows:
            (self._join if isinstance(self.window, Session) else self._assign)(row, before or NEVER)
        self.close(watermark or NEVER)

    def _assign(self, row: Row, before: datetime) -> None:
        chosen = [each for each in windows_of(self.window, row[1]) if each[1] > before]
        if not chosen:
            self.late.append(row)
        for start, end in chosen:
            self.windows.setdefault((row[0], start, end), []).append(row)

    def _join(self, row: Row, before: datetime) -> None:
        start, end, rows = row[1], row[1] + self.window.gap, [row]
        if end < before:
            self.late.append(row)
            return
        for other in [one for one in self.open if one[2][0][0] == row[0] and one[0] <= end and start <= one[1]]:
            self.open.remove(other)
            start, end, rows = min(start, other[0]), max(end, other[1]), [*rows, *other[2]]
        self.open.append((start, end, rows))

    def close(self, watermark: datetime) -> None:
        """Close the sessions that are over."""
        for one in [one for one in self.open if one[1] < watermark]:
            self.open.remove(one)
            key = one[2][0][0], one[0], one[1]
            assert key not in self.windows
            self.windows[key] = one[2]

    @property
    def totals(self) -> dict[Shown, tuple[Any, ...]]:
        """All windows."""
        return {key: totals_of(rows) for key, rows in self.windows.items()}


def read_windows(made: pa.Table) -> list[tuple[Shown, tuple[Any, ...]]]:
    """The windows of an output."""
    names = ("user", "window_start", "window_end")
    return [
        (tuple(row[name] for name in names), tuple(row[each.name] for each in FUNCTIONS)) for row in made.to_pylist()
    ]


def times_of(
    given: Iterable[Iterable[tuple[int, int, int | None]]], begin: datetime, unit: timedelta
) -> list[list[Row]]:
    """Rows whose times move on by seven units per batch."""
    return [
        [(user, begin + (7 * number + jitter) * unit, v) for user, jitter, v in batch]
        for number, batch in enumerate(given)
    ]
