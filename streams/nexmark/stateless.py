"""Queries that keep nothing: each row of the answer is made of one bid."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

import siltstone as st

from .events import TIME
from .source import query


class MapBids(st.Operator):
    """Maps bids by a function from table to table, which gets the auction and the other columns that are given."""

    key = pa.schema({"auction": pa.int64()})
    reads = "bids"

    def __init__(
        self, name: str, function: Callable[[pa.Table], pa.Table], inputs: list[str], output: dict[str, pa.DataType]
    ) -> None:
        super().__init__(name=name, inputs=tuple(inputs), output=pa.schema(output))
        self.function = function

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Return what the function makes of the rows."""
        return self.function(rows.table)


def _select(bids: pa.Table, *columns: str, **made: pa.ChunkedArray) -> pa.Table:
    return pa.table({**{name: bids[name] for name in columns}, **made})


def _priced(bids: pa.Table) -> pa.Table:
    return bids.select(["auction", "bidder", "price", "date_time", "extra"])


def _in_euros(bids: pa.Table) -> pa.Table:
    return _priced(bids).set_column(2, "price", pc.multiply(bids["price"].cast(pa.float64()), 0.908))


def _some_auctions(bids: pa.Table) -> pa.Table:
    chosen = bids["auction"].to_numpy() % 123 == 0
    return bids.filter(pa.array(chosen)).select(["auction", "price"])


def _with_day(bids: pa.Table) -> pa.Table:
    day, minute = pc.strftime(bids["date_time"], "%Y-%m-%d"), pc.strftime(bids["date_time"], "%H:%M")
    return _select(bids, "auction", "bidder", "price", "date_time", "extra", day=day, minute=minute)


def _calculated(bids: pa.Table) -> pa.Table:
    bids = _in_euros(bids)
    bids = bids.filter(pc.and_(pc.greater(bids["price"], 1e6), pc.less(bids["price"], 5e7)))
    hour = pc.hour(bids["date_time"])
    day = pc.and_(pc.greater_equal(hour, 8), pc.less_equal(hour, 18))
    night = pc.or_(pc.less_equal(hour, 6), pc.greater_equal(hour, 20))
    when = pc.if_else(day, "dayTime", pc.if_else(night, "nightTime", "otherTime"))
    letters = pc.count_substring(bids["extra"], "c").cast(pa.int64())
    return _select(bids, *bids.column_names, time_of_day=when, letters=letters)


def _with_channel(bids: pa.Table) -> pa.Table:
    known = pc.index_in(pc.utf8_lower(bids["channel"]), pa.array(["apple", "google", "facebook", "baidu"]))
    from_url = pc.struct_field(pc.extract_regex(bids["url"], r"(?:&|^|\?)channel_id=(?P<id>[^&]*)"), "id")
    channel = pc.if_else(pc.is_valid(known), known.cast(pa.string()), from_url)
    return _select(bids, "auction", "bidder", "price", "channel", channel_id=channel).filter(pc.is_valid(channel))


def _with_directories(bids: pa.Table) -> pa.Table:
    parts = pc.split_pattern(bids["url"], "/")
    made = {
        f"dir{n}": pc.list_element(pc.list_slice(parts, n + 2, n + 3, return_fixed_size_list=True), 0)
        for n in (1, 2, 3)
    }
    return _select(bids, "auction", "bidder", "price", "channel", **made)


_ID, _TEXT = pa.int64(), pa.string()
_PRICED = ["bidder", "price", "date_time", "extra"]
_BID = {"auction": _ID, "bidder": _ID, "price": _ID, "date_time": TIME, "extra": _TEXT}
_EUROS = {**_BID, "price": pa.float64()}
_URL = ["bidder", "price", "channel", "url"]
_CHANNEL = {"auction": _ID, "bidder": _ID, "price": _ID, "channel": _TEXT}

Q0 = query(0, ["bids"], [MapBids("bids_again", _priced, _PRICED, _BID)])
Q1 = query(1, ["bids"], [MapBids("euros", _in_euros, _PRICED, _EUROS)])
Q2 = query(2, ["bids"], [MapBids("chosen", _some_auctions, ["price"], {"auction": _ID, "price": _ID})])
Q10 = query(10, ["bids"], [MapBids("log", _with_day, _PRICED, {**_BID, "day": _TEXT, "minute": _TEXT})])
Q14 = query(
    14,
    ["bids"],
    [MapBids("calculated", _calculated, _PRICED, {**_EUROS, "time_of_day": _TEXT, "letters": _ID})],
)
Q21 = query(21, ["bids"], [MapBids("channels", _with_channel, _URL, {**_CHANNEL, "channel_id": _TEXT})])
Q22 = query(
    22,
    ["bids"],
    [MapBids("directories", _with_directories, _URL, {**_CHANNEL, "dir1": _TEXT, "dir2": _TEXT, "dir3": _TEXT})],
)
