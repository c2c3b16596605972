"""What timed operators should come to, as a batch query over all rows at once by pandas, which knows no steps.

A frame of rows has the columns `user`, `at`, `v`, and what the stream decided of each: `before`, the watermark of the
step before the row's (NaT before the first), and `until`, the watermark when an edit took the row out of state (NaT if
none did). A window counts a row if it ended after `before` and by `until`: nothing else depends on the stream.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import pandas

from siltstone.aggregates.windows import Cumulative, Session, Tumbling

pd: Any = pandas
Frame: TypeAlias = Any
"""a data frame"""
Windows = dict[tuple[Any, ...], tuple[Any, ...]]
"""(user, start, end) -> n, n_v, total, least, most, mean, first, last"""


def aligned(rows: Frame, window: Any) -> Frame:
    """Join rows with the aligned windows that contain them, as `generate_series` does: columns `start` and `end`."""
    shown = rows["at"].dt.tz_convert(window.zone or "UTC").dt.tz_localize(None)  # what clocks show
    parts = []
    every = window.size if isinstance(window, Tumbling) else window.every
    for number in range(window.size // every):
        start = (shown - window.offset).dt.floor(window.size if isinstance(window, Cumulative) else every)
        if isinstance(window, Cumulative):
            end = start + (number + 1) * every
        else:
            start -= number * every
            end = start + window.size
        parts.append(rows.assign(start=start + window.offset, end=end + window.offset, shown=shown))
    joined = pd.concat(parts)
    joined = joined[(joined["start"] <= joined["shown"]) & (joined["shown"] < joined["end"])]
    for name in ("start", "end"):
        there = joined[name].dt.tz_localize(window.zone or "UTC", ambiguous="raise", nonexistent="raise")
        joined[name] = there.dt.tz_convert("UTC")
    return joined.drop(columns="shown")


def counted(joined: Frame) -> Frame:
    """Choose the pairs of row and window that count."""
    return joined[
        (joined["before"].isna() | (joined["end"] > joined["before"]))
        & (joined["until"].isna() | (joined["end"] <= joined["until"]))
    ]


def sessions(rows: Frame, gap: timedelta) -> Frame:
    """Find the islands of each user's rows, where a pause of more than the gap is a gap: columns `start` and `end`."""
    rows = rows.sort_values(["user", "at"])
    island = (rows.groupby("user")["at"].diff() > gap).groupby(rows["user"]).cumsum()
    of = rows.groupby(["user", island])["at"]
    return rows.assign(start=of.transform("min"), end=of.transform("max") + gap)


def totals(joined: Frame) -> Windows:
    """Aggregate by user and window."""
    if joined.empty:
        return {}
    keys = ["user", "start", "end"]
    by = joined.sort_values(["at", "v"]).groupby(keys)
    made = by["v"].agg(n_v="count", least="min", most="max", mean="mean", first="first", last="last")
    made.insert(0, "n", by.size())
    made.insert(2, "total", by["v"].sum(min_count=1))
    plain = made.astype(object).where(made.notna(), None)
    return {
        (user, start.to_pydatetime(), end.to_pydatetime()): tuple(row)
        for (user, start, end), row in zip(plain.index, plain.itertuples(index=False), strict=True)
    }


def windows(rows: Frame, window: Any) -> Windows:
    """All windows of a stream, by a query over its rows."""
    joined = sessions(rows, window.gap) if isinstance(window, Session) else counted(aligned(rows, window))
    return totals(joined)


def firsts(rows: Frame, keys: list[str], order: list[str]) -> Frame:
    """The first row of each group: `row_number() over (partition by keys order by order) = 1`."""
    return rows.sort_values(order).groupby(keys, as_index=False).head(1)


def merge_counts(made: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
    """(user, start, end) -> rows counted, of windows of which late rows may have made more than one."""
    found = dict[tuple[Any, ...], int]()
    for row in made:
        key = row["user"], row["window_start"], row["window_end"]
        found[key] = found.get(key, 0) + row["n"]
    return found
