"""Streams that join two sources, rows for them of which none is late, and the joins computed by hand, pair by pair."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

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
    "bids": {"k": pa.int64(), "at": TIME, "b": pa.int64()},
}
COLUMNS = {"asks": {"at": TIME, "until": TIME, "a": pa.int64()}, "bids": {"b": pa.int64()}}
JOIN = {
    "key": {"k": pa.int64()},
    "reads": {"asks": {"id": "k"}, "bids": {"k": "k"}},
    "on": {"asks": "at", "bids": "at"},
    "columns": COLUMNS,
    "names": {"bids": {"at": "bid_at"}},
}
BOUNDS: list[tuple[int, int | str]] = [(0, 5), (-3, 3), (-6, -2), (2, 7), (0, 0), (0, "until"), (-2, "until")]
"""intervals, in minutes"""
Ask = tuple[int, datetime, datetime | None, int | None]
Bid = tuple[int, datetime, int | None]


def minutes(count: int) -> timedelta:
    return timedelta(minutes=count)


def less(pairs: pa.Table) -> Any:
    """A condition of pairs; null if a column is."""
    return pc.less(pairs["a"], pairs["b"])


def interval_join(
    how: str,
    bounds: tuple[int, int | str],
    where: Callable[[pa.Table], Any] | None = None,
    output_time: str | None = None,
) -> Operator:
    between = minutes(bounds[0]), bounds[1] if isinstance(bounds[1], str) else minutes(bounds[1])
    options: dict[str, Any] = {"how": how, "where": where, "output_time": output_time, **JOIN}
    return IntervalJoin("joined", between=between, **options)


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
    """The rows of a step."""

    asks: list[Ask]
    bids: list[Bid]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each source that has some."""
        given = {"asks": self.asks, "bids": self.bids}
        return {
            name: [dict(zip(SCHEMA[name], row, strict=True)) for row in rows] for name, rows in given.items() if rows
        }

    def step(self, tester: StreamTester) -> dict[str, pa.Table]:
        """Take the step; a source without rows is left out."""
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


def rows_of(table: pa.Table) -> "Counter[tuple[Any, ...]]":
    """The rows of an output, each with how often it is there."""
    return Counter(tuple(row.values()) for row in table.to_pylist())


def matches(ask: Ask, bid: Bid, bounds: tuple[int, int | str], *, where: bool) -> bool:
    """Whether two rows are a pair."""
    lower, upper = bounds
    last = ask[2] if isinstance(upper, str) else ask[1] + minutes(upper)
    if ask[0] != bid[0] or last is None or not ask[1] + minutes(lower) <= bid[1] <= last:
        return False
    return not where or (ask[3] is not None and bid[2] is not None and ask[3] < bid[2])


def joined_by_hand(
    batches: list[Batch], how: str, bounds: tuple[int, int | str], *, where: bool
) -> "Counter[tuple[Any, ...]]":
    """Join all rows, as SQL does."""
    asks, bids = [row for batch in batches for row in batch.asks], [row for batch in batches for row in batch.bids]
    pairs = [
        (i, j) for i, ask in enumerate(asks) for j, bid in enumerate(bids) if matches(ask, bid, bounds, where=where)
    ]
    met = {i for i, _ in pairs}, {j for _, j in pairs}
    if how in ("semi", "anti"):
        return Counter(ask for i, ask in enumerate(asks) if (i in met[0]) == (how == "semi"))
    made = Counter((*asks[i], *bids[j][1:]) for i, j in pairs)
    if how in ("left", "full"):
        made += Counter((*ask, None, None) for i, ask in enumerate(asks) if i not in met[0])
    if how in ("right", "full"):
        made += Counter((bid[0], None, None, None, *bid[1:]) for j, bid in enumerate(bids) if j not in met[1])
    return made


def looked_up_by_hand(batches: list[Batch], how: str) -> "Counter[tuple[Any, ...]]":
    """Find of each ask the newest bid of its key that is not later."""
    bids, made = [row for batch in batches for row in batch.bids], Counter[tuple[Any, ...]]()
    for ask in (row for batch in batches for row in batch.asks):
        known = [bid[1:] for bid in bids if bid[0] == ask[0] and bid[1] <= ask[1]]
        newest = max(known, key=lambda bid: (bid[0], bid[1] is not None, bid[1]), default=None)
        if newest or how == "left":
            made[(*ask, *(newest or (None, None)))] += 1
    return made
