"""Queries that join people, auctions and bids."""

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import siltstone as st
from siltstone.state.backend import Keys

from .events import SLOTS, TIME
from .source import columns_of, query

_ID, _TEXT = pa.int64(), pa.string()


class JoinUnique(st.Operator):
    """Joins rows of two inputs, of which the first has one row per key. It is kept for ever; rows of the second that
    come before it wait for it."""

    def __init__(
        self,
        name: str,
        key: str,
        one: tuple[str, str, dict[str, pa.DataType]],
        many: tuple[str, str, dict[str, pa.DataType]],
        where: Callable[[pa.Table], pa.Array],
    ) -> None:
        """Args:
        one, many: each an input, its column that is the key, and its other columns.
        where: which pairs count.
        """
        (self.one, first, ones), (self.many, second, manies) = one, many
        self.where = where
        self.known, self.waiting = st.ValueState(ones), st.ListState(manies)
        super().__init__(
            name=name,
            key=pa.schema({key: _ID}),
            reads={self.one: {first: key}, self.many: {second: key}},
            inputs={self.one: tuple(ones), self.many: tuple(manies)},
            output=pa.schema({key: _ID, **ones, **manies}),
        )

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Return the pairs of which both rows are there now."""
        one, many = rows.of(self.one), rows.of(self.many)
        state.known.put(one.keys, {name: one.last(name) for name in state.known.get(one.keys).column_names})
        at, waited = state.waiting.get(one.keys)
        state.waiting.delete(one.keys)
        known, new = state.known.contains(many.keys)[many.key_index], many.table.select(waited.column_names)
        late = np.flatnonzero(~known)
        state.waiting.append(many.keys, many.key_index[late], new.take(pa.array(late)))
        pairs = [self._pair(state, one.keys, at, waited)]
        there = np.flatnonzero(known)
        pairs.append(self._pair(state, many.keys, many.key_index[there], new.take(pa.array(there))))
        both = pa.concat_tables(pairs)
        return both.filter(self.where(both))

    def _pair(self, state: st.State, keys: Keys, at: np.ndarray, rows: pa.Table) -> pa.Table:
        known = keys.with_columns(columns_of(state.known.get(keys))).take(pa.array(at))
        return pa.table({**columns_of(known), **columns_of(rows)}, schema=self.output)


Q3 = query(
    3,
    ["persons", "auctions"],
    [
        JoinUnique(
            "local",
            "seller",
            ("persons", "id", {"name": _TEXT, "city": _TEXT, "state": _TEXT}),
            ("auctions", "seller", {"id": _ID, "category": _ID}),
            lambda pairs: pc.and_(
                pc.equal(pairs["category"], 10), pc.is_in(pairs["state"], pa.array(["OR", "ID", "CA"]))
            ),
        )
    ],
)
"""who sells in three states in one category"""

Q20 = query(
    20,
    ["bids", "auctions"],
    [
        JoinUnique(
            "expanded",
            "auction",
            ("auctions", "id", {"item": _TEXT, "initial_bid": _ID, "expires": TIME, "seller": _ID, "category": _ID}),
            ("bids", "auction", {"bidder": _ID, "price": _ID, "date_time": TIME, "url": _TEXT}),
            lambda pairs: pc.equal(pairs["category"], 10),
        )
    ],
)
"""bids on auctions of one category, with their auctions"""

OFFERS = st.IntervalJoin(
    "offers",
    key={"auction": _ID},
    reads={"auctions": {"id": "auction"}, "bids": {"auction": "auction"}},
    on={"auctions": "date_time", "bids": "date_time"},
    columns={"auctions": {"seller": _ID, "category": _ID, "expires": TIME}, "bids": {"bidder": _ID, "price": _ID}},
    between=("0 seconds", "expires"),
    names={"auctions": {"date_time": "opened"}},
    output_time="date_time",
)
"""the bids on each auction while it was open"""


class Winners(st.Operator):
    """Returns the highest bid on each auction once it has expired; of equal ones the earliest."""

    name = "winners"
    key = pa.schema({"auction": _ID})
    reads = "offers"
    inputs = ("seller", "category", "expires", "date_time", "bidder", "price")
    output = pa.schema(
        {
            "auction": _ID,
            "seller": _ID,
            "category": _ID,
            "expires": TIME,
            "date_time": TIME,
            "bidder": _ID,
            "price": _ID,
        }
    )
    output_time = "expires"
    best = st.ValueState(pa.schema(list(output)[1:]))
    closes = st.Timer()

    def process(self, rows: st.Rows, state: st.State) -> None:
        """Keep the best bid so far."""
        old = state.best.get(rows.keys)
        at, bidder = (pc.negate(rows.table[name].cast(_ID)) for name in ("date_time", "bidder"))
        best = rows.table.take(rows.last(np.arange(len(rows)), by=("price", at, bidder)))
        # Times of another operator's rows have the zone of Spark's session.
        new = {each.name: best[each.name].cast(each.type) for each in old.schema}
        first = pc.or_(
            pc.less(new["date_time"], old["date_time"]),
            pc.and_(pc.equal(new["date_time"], old["date_time"]), pc.less(new["bidder"], old["bidder"])),
        )
        better = pc.or_(pc.greater(new["price"], old["price"]), pc.and_(pc.equal(new["price"], old["price"]), first))
        better = pc.fill_null(better, True)
        state.best.put(rows.keys, {name: pc.if_else(better, new[name], old[name]) for name in new})
        # A bid in the last moment counts, and rows at the watermark are not late.
        state.closes.set(rows.keys, pc.add(new["expires"], pa.scalar(timedelta(microseconds=1))))

    def on_timer(self, due: st.Due, state: st.State) -> pa.Table:
        """Return the best bids on auctions that have expired."""
        best = state.best.get(due.keys)
        state.best.delete(due.keys)
        return due.keys.with_columns(columns_of(best))


class MeanOfNewest(st.TopN):
    """The mean price of the `n` rows with the greatest `by`."""

    def result(self, columns: list[pa.Array]) -> pa.Array:
        """Return the mean of each list."""
        prices = columns[0].flatten().field("price").to_numpy()
        ends = np.cumsum(pc.list_value_length(columns[0]).to_numpy())
        sums = np.concatenate(([0], np.cumsum(prices)))
        begins = np.concatenate(([0], ends[:-1]))
        return pa.array((sums[ends] - sums[begins]) / (ends - begins))

    def result_type(self) -> pa.DataType:
        """Return the type of a mean."""
        return pa.float64()


_BOTH = ["auctions", "bids"]
Q9 = query(9, _BOTH, [OFFERS, Winners()])
"""the winning bid on each auction"""
Q4 = query(
    4,
    _BOTH,
    [
        OFFERS,
        Winners(),
        st.Aggregate("categories", {"category": _ID}, [st.Average("mean", of="price")], reads="winners"),
    ],
)
"""the mean of the winning bids in each category"""
Q6 = query(
    6,
    _BOTH,
    [
        OFFERS,
        Winners(),
        st.Aggregate(
            "sellers",
            {"seller": _ID},
            [MeanOfNewest("mean", 10, by="expires", by_type=TIME, of={"auction": _ID, "price": _ID})],
            reads="winners",
        ),
    ],
)
"""the mean of each seller's ten newest winning bids"""


class JoinSideInput(st.Operator):
    """Adds a value from a small table to each bid."""

    name = "looked_up"
    key = pa.schema({"auction": _ID})
    output = pa.schema({"auction": _ID, "bidder": _ID, "price": _ID, "date_time": TIME, "value": _TEXT})
    table = st.BroadcastState(reads="side", key={"slot": _ID}, value={"value": _TEXT, "version": _ID}, by="version")

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Return each bid with the value of its auction's slot, if there is one."""
        bids = rows.of("bids").table
        slot = pa.array(bids["auction"].to_numpy() % SLOTS)
        found = state.table.get(pa.table({"slot": slot}))
        return bids.append_column("value", found["value"]).filter(found["value"].is_valid()).select(self.output.names)


Q13 = query(
    13,
    ["side", "bids"],
    [JoinSideInput(reads={"bids": {"auction": "auction"}}, inputs={"bids": ("bidder", "price", "date_time")})],
)
"""bids with what a table that does not change says of them"""
