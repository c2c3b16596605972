"""Expiry at the end of a step: rows whose time to live is over are deleted."""

import numpy as np

from siltstone.state.access import ListAccess, find_owners, positions_of
from siltstone.state.backend import KeyedState
from siltstone.state.columns import null_mask, one_array
from siltstone.state.schema import WRITTEN_AT
from siltstone.state.time_index import TimedTable
from siltstone.state.ttl import TTL, with_stamp

EXPIRED_AT_ONCE = 1 << 18
"""most rows that are deleted at once"""


def expire(name: str, timed: TimedTable, ttl: TTL, upto: int, state: KeyedState) -> None:
    """Delete the rows of a table that are due, and stamp those without a stamp, whose time begins now.

    Args:
        timed: the table, with stamps.
        upto: the step's time by the TTL's clock, in microseconds since 1970.
        state: the operator's, for the bounds of a list or window.
    """
    stamp = ttl.stamp_of(upto)
    assert stamp is not None and ttl.after_us is not None, "other tables are in no time index"
    begins = stamp + ttl.after_us > upto  # not once a stream has ended: its watermark is after all stamps
    timed.begin_round()
    while len((due := timed.take(upto, EXPIRED_AT_ONCE)).at):
        unstamped = null_mask(one_array(due.values.column(WRITTEN_AT))) & begins
        if unstamped.all():
            timed.put(due.keys, with_stamp(due.values, timed.schema, stamp))
            continue
        gone = due.keys
        if unstamped.any():
            fresh = due.take(np.flatnonzero(unstamped))
            timed.put(fresh.keys, with_stamp(fresh.values, timed.schema, stamp))
            gone = due.keys.take(np.flatnonzero(~unstamped))
        timed.delete(gone)
        if (bounds := state.tables.get(f"{name}.bounds")) is not None:
            owners = find_owners(bounds.schema.key, gone.columns, gone.key_groups)
            ListAccess(name, state.tables, drops_bounds=True).trim(*owners, positions_of(gone))
