"""Streams that join two sources, and rows for them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute

from siltstone.joins.interval import IntervalJoin
from siltstone.joins.lookup import LookupJoin
from siltstone.operator import Operator
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from tests.timed_streams import BEGIN

pc: Any = pyarrow.compute
TIME = pa.timestamp("us", "UTC")
DELAY = 4
"""of both sources, in minutes"""
SCHEMA = {
    "asks": {"id": pa.int32(), "at": TIME, "until": TIME, "a": pa.int64()},
    "bids": {"k": pa.int64(), "at": TIME, "b": pa.float64()},
}
FLOATS = {"asks": {**SCHEMA["asks"], "id": pa.float32()}, "bids": {**SCHEMA["bids"], "k": pa.float64()}}
"""the same with floats for keys"""
COLUMNS = {"asks": {"at": TIME, "until": TIME, "a": pa.int64()}, "bids": {"b": pa.float64()}}
JOIN = {
    "key": {"k": pa.int64()},
    "reads": {"asks": {"id": "k"}, "bids": {"k": "k"}},
    "on": {"asks": "at", "bids": "at"},
    "columns": COLUMNS,
    "names": {"bids": {"at": "bid_at"}},
}
BOUNDS: list[tuple[int, int | str]] = [(0, 5), (-3, 3), (-6, -2), (2, 7), (0, 0), (0, "until"), (-2, "until")]
"""intervals, in minutes"""
Row: TypeAlias = tuple[Any, ...]
Ask = tuple[float | None, datetime, datetime | None, int | None]
Bid = tuple[float | None, datetime, float | None]


def minutes(count: int) -> timedelta:
    return timedelta(minutes=count)


def less(pairs: pa.Table) -> Any:
    """A condition of pairs; null if a column is."""
    return pc.less(pairs["a"], pairs["b"])


def interval_join(
    how: str,
    bounds: tuple[int, int | str],
    where: Callable[[pa.Table], Any] | None = None,
    **options: Any,
) -> Operator:
    between = minutes(bounds[0]), bounds[1] if isinstance(bounds[1], str) else minutes(bounds[1])
    return IntervalJoin("joined", between=between, how=how, where=where, **{**JOIN, **options})


def lookup_join(**options: Any) -> Operator:
    return LookupJoin("joined", **{**JOIN, **options})


def joining(*operators: Operator, **options: Any) -> Stream:
    times = {name: EventTime("at", delay=minutes(DELAY)) for name in SCHEMA}
    return Stream(
        "joins",
        sources=dict.fromkeys(SCHEMA),
        operators=operators,
        **{"event_time": times, "max_parallelism": 8, "sinks": {op.name: None for op in operators}, **options},
    )


@dataclass
class Batch:
    """The rows of a step.

    Attributes:
        before: the watermark of the step before, if this one is taken by a tester; earlier rows are late.
    """

    asks: list[Ask]
    bids: list[Bid]
    before: datetime | None = None

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each source that has some."""
        given = {"asks": self.asks, "bids": self.bids}
        return {
            name: [dict(zip(SCHEMA[name], row, strict=True)) for row in rows] for name, rows in given.items() if rows
        }

    def step(self, tester: StreamTester) -> dict[str, pa.Table]:
        """Take the step; a source without rows is left out."""
        self.before = tester.watermark
        return tester.step(self.rows())


def batches_of(drawn: Iterable[tuple[tuple[int, int], list[Any], list[Any]]]) -> list[Batch]:
    """Make steps of what was drawn: how far each source goes on, and rows of it at most `DELAY` before its newest."""
    made, now, high = list[Batch](), [0, 0], [0, 0]
    for ahead, asks, bids in drawn:
        now = [now[0] + ahead[0], now[1] + ahead[1]]
        batch = Batch([], [])
        for key, at, until, a in asks:
            moment = max(now[0] + at, high[0] - DELAY)
            batch.asks.append(
                (key, BEGIN + minutes(moment), None if until is None else BEGIN + minutes(moment + until), a)
            )
        for key, at, b in bids:
            batch.bids.append((key, BEGIN + minutes(max(now[1] + at, high[1] - DELAY)), b))
        for side, rows in enumerate((batch.asks, batch.bids)):
            high[side] = max([high[side], *((row[1] - BEGIN) // minutes(1) for row in rows)])
        made.append(batch)
    return made


def rows_of(table: pa.Table) -> "Counter[Row]":
    """The rows of an output, each with how often it is there."""
    return count_rows(tuple(row.values()) for row in table.to_pylist())


def count_rows(rows: Iterable[Row]) -> "Counter[Row]":
    """Count how often each row is there; NaN, which Python takes to differ from itself, is a text."""
    return Counter(
        tuple("NaN" if isinstance(value, float) and math.isnan(value) else value for value in row) for row in rows
    )
