"""Queries over windows of time."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import siltstone as st

from .events import TIME
from .source import columns_of, query

TEN_SECONDS = 10_000_000
"""in microseconds"""


class Greatest(st.Operator):
    """Returns the rows of each window with the greatest value of a column, of equal ones all."""

    key = pa.schema({"window_end": TIME})

    def __init__(
        self, name: str, reads: str, by: str, columns: dict[str, pa.DataType], inputs: tuple[str, ...] = ()
    ) -> None:
        self.by, self.columns = by, list(columns)
        self.most = st.ValueState({by: pa.int64()})
        self.rows = st.ListState(columns)
        self.closes = st.Timer()
        kept = pa.schema([*self.key, *pa.schema(columns)])
        super().__init__(name=name, reads=reads, inputs=inputs or tuple(columns), output=kept, output_time="window_end")

    def process(self, rows: st.Rows, state: st.State) -> None:
        """Keep the rows that are the greatest so far."""
        table = self.choose_from(rows.table)
        old = state.most.get(rows.keys)[self.by]
        most = rows.max(table[self.by], initial=old)
        state.rows.delete(rows.keys.take(np.flatnonzero(pc.fill_null(pc.greater(most, old), False))))
        greatest = pc.equal(table[self.by], most.take(pa.array(rows.key_index)))
        state.rows.append(rows.keys, rows.key_index[greatest.to_numpy()], table.filter(greatest).select(self.columns))
        state.most.put(rows.keys, {self.by: most})
        state.closes.set(rows.keys, rows.keys.columns["window_end"])

    def choose_from(self, table: pa.Table) -> pa.Table:
        """Return one row for each that was read."""
        return table

    def on_timer(self, due: st.Due, state: st.State) -> pa.Table:
        """Return the rows of windows that have ended."""
        at, rows = state.rows.get(due.keys)
        state.rows.delete(due.keys)
        state.most.delete(due.keys)
        return rows.add_column(0, "window_end", due.keys.columns["window_end"].take(pa.array(at)))


BIDS = [st.Count("bids")]
_AUCTION = {"auction": pa.int64()}
_BIDDER = {"bidder": pa.int64()}
_DAY = st.Tumbling("1 day", on="date_time")

Q5 = query(
    5,
    ["bids"],
    [
        st.Aggregate(
            "counts", _AUCTION, BIDS, reads="bids", window=st.Sliding("10 seconds", every="2 seconds", on="date_time")
        ),
        Greatest("hottest", "counts", "bids", {**_AUCTION, "bids": pa.int64()}),
    ],
)
"""the auctions with the most bids of the last ten seconds, every two seconds"""


class GreatestTop(Greatest):
    """Returns the greatest of rows that are in `top`, each in a list of its own."""

    def choose_from(self, table: pa.Table) -> pa.Table:
        """Take the rows out of their lists."""
        top = pa.Table.from_struct_array(pc.list_flatten(table["top"]))
        return top.append_column("auction", table["auction"])


Q7 = query(
    7,
    ["bids"],
    [
        st.Aggregate(
            "dearest",
            _AUCTION,
            [st.TopN("top", 1, by="price", of={"date_time": TIME, **_BIDDER})],
            reads="bids",
            window=st.Tumbling("10 seconds", on="date_time"),
        ),
        GreatestTop(
            "highest",
            "dearest",
            "price",
            {**_AUCTION, "price": pa.int64(), "date_time": TIME, **_BIDDER},
            inputs=("auction", "top"),
        ),
    ],
)
"""the highest bids of each ten seconds; of equal ones on one auction the first"""


def _same_window(pairs: pa.Table) -> pa.Array:
    first, second = (pc.divide(pairs[name].cast(pa.int64()), TEN_SECONDS) for name in ("date_time", "opened"))
    return pc.equal(first, second)


Q8 = query(
    8,
    ["persons", "auctions"],
    [
        st.IntervalJoin(
            "newcomers",
            key={"person": pa.int64()},
            reads={"persons": {"id": "person"}, "auctions": {"seller": "person"}},
            on={"persons": "date_time", "auctions": "date_time"},
            columns={"persons": {"name": pa.string()}},
            between=("-10 seconds", "10 seconds"),
            where=_same_window,
            how="semi",
            names={"auctions": {"date_time": "opened"}},
        )
    ],
)
"""people who registered and opened an auction within the same ten seconds"""

Q11 = query(
    11,
    ["bids"],
    [st.Aggregate("sessions", _BIDDER, BIDS, reads="bids", window=st.Session("10 seconds", on="date_time"))],
)
"""bids per session of each bidder"""


class CountByTimeOfDay(st.Operator):
    """Counts each bidder's bids of ten seconds by the time of day."""

    name = "recent"
    key = pa.schema(_BIDDER)
    reads = "bids"
    inputs = ("price",)
    output = pa.schema({**_BIDDER, "bids": pa.int64(), "window_end": TIME})
    counts = st.ValueState({"bids": pa.int64(), "window_end": TIME})
    closes = st.Timer("processing")

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Add to the counts of the ten seconds in progress; return those of earlier ones, whose timers are late."""
        now = pa.scalar(state.clock.now, TIME).cast(pa.int64()).as_py()
        end = pa.scalar((now // TEN_SECONDS + 1) * TEN_SECONDS, TIME)
        old = state.counts.get(rows.keys)
        ended = pc.fill_null(pc.less(old["window_end"], end), False)
        begun = pc.if_else(ended, None, old["bids"])
        ends = pa.repeat(end, len(rows.keys))
        state.counts.put(rows.keys, {"bids": rows.count(initial=begun), "window_end": ends})
        state.closes.set(rows.keys, end)
        return rows.keys.with_columns(columns_of(old)).filter(ended)

    def on_timer(self, due: st.Due, state: st.State) -> pa.Table:
        """Return the counts of the ten seconds that have ended."""
        counts = state.counts.get(due.keys)
        state.counts.delete(due.keys)
        return due.keys.with_columns(columns_of(counts))


Q12 = query(12, ["bids"], [CountByTimeOfDay()])


@dataclass(frozen=True)
class CountBetween(st.Count):
    """The number of values of `of` from `least` up to, and without, `below`; None for no end."""

    least: int = 0
    below: int | None = None

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        """Return 1 for values that count."""
        inside = pc.greater_equal(columns[0], self.least)
        if self.below is not None:
            inside = pc.and_(inside, pc.less(columns[0], self.below))
        return [pc.fill_null(inside, False).cast(pa.int64())]


RANKS = [
    CountBetween("rank1", of="price", below=10_000),
    CountBetween("rank2", of="price", least=10_000, below=1_000_000),
    CountBetween("rank3", of="price", least=1_000_000),
]

Q17 = query(
    17,
    ["bids"],
    [
        st.Aggregate(
            "days",
            _AUCTION,
            [
                *BIDS,
                *RANKS,
                st.Min("least", of="price"),
                st.Max("most", of="price"),
                st.Average("mean", of="price"),
                st.Sum("total", of="price"),
            ],
            reads="bids",
            window=_DAY,
            emit="update",
        )
    ],
)
"""what was bid on each auction, day by day"""


class Distinct(st.Operator):
    """Adds up, per day, the bids of each bidder and on each auction, and counts those that have any."""

    COUNTS = ("bids", "rank1", "rank2", "rank3")

    def __init__(self, name: str, key: dict[str, pa.DataType]) -> None:
        counted = [f"{what}_{count}" for what in ("bidders", "auctions") for count in self.COUNTS]
        self.totals = st.ValueState(dict.fromkeys([*self.COUNTS, *counted], pa.int64()))
        self.closes = st.Timer()
        keys = pa.schema({"window_end": TIME, **key})
        inputs = ["by_bidder", "by_auction"]
        super().__init__(
            name=name,
            key=keys,
            reads={each: {column: column for column in keys.names} for each in inputs},
            inputs=dict.fromkeys(inputs, self.COUNTS),
            output=pa.schema([*keys, *((column, pa.int64()) for column in [*self.COUNTS, *counted])]),
        )

    def process(self, rows: st.Rows, state: st.State) -> None:
        """Add the bids and bidders, and the auctions, of days that have ended."""
        for what, name in (("bidders", "by_bidder"), ("auctions", "by_auction")):
            some = rows.of(name)
            old = state.totals.get(some.keys)
            totals = {column: pc.fill_null(old[column], 0) for column in old.column_names}
            for count in self.COUNTS:
                has_any = pc.greater(some.table[count], 0)
                totals[f"{what}_{count}"] = some.sum(has_any, initial=totals[f"{what}_{count}"])
                if what == "bidders":
                    totals[count] = some.sum(count, initial=totals[count])
            state.totals.put(some.keys, totals)
        state.closes.set(rows.keys, rows.keys.columns["window_end"])

    def on_timer(self, due: st.Due, state: st.State) -> pa.Table:
        """Return the totals of days that have ended."""
        totals = state.totals.get(due.keys)
        state.totals.delete(due.keys)
        return due.keys.with_columns(columns_of(totals))


def _daily(number: int, key: dict[str, pa.DataType]) -> st.Stream:
    aggregates = [*BIDS, *RANKS]
    by_bidder = st.Aggregate("by_bidder", {**key, **_BIDDER}, aggregates, reads="bids", window=_DAY)
    by_auction = st.Aggregate("by_auction", {**key, **_AUCTION}, aggregates, reads="bids", window=_DAY)
    return query(number, ["bids"], [by_bidder, by_auction, Distinct("daily", key)])


Q15 = _daily(15, {})
Q16 = _daily(16, {"channel": pa.string()})
