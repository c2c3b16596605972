"""Queries that keep the first rows of each key by a column: the function `TopN`."""

import pyarrow as pa

import siltstone as st

from .events import TIME
from .source import query

_ID, _TEXT = pa.int64(), pa.string()

Q18 = query(
    18,
    ["bids"],
    [
        st.Aggregate(
            "newest",
            {"bidder": _ID, "auction": _ID},
            [st.TopN("bids", 1, by="date_time", by_type=TIME, of={"price": _ID, "channel": _TEXT, "url": _TEXT})],
            reads="bids",
        )
    ],
)
"""each bidder's newest bid on each auction"""

Q19 = query(
    19,
    ["bids"],
    [
        st.Aggregate(
            "top",
            {"auction": _ID},
            [st.TopN("bids", 10, by="price", of={"date_time": TIME, "bidder": _ID, "channel": _TEXT})],
            reads="bids",
        )
    ],
)
"""the ten highest bids on each auction"""
