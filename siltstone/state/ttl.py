"""Time-to-live: the setting `TTL`, and the table that stamps its rows with the time at which they were written.

A variable with a `TTL` has one more value column, `written_at`, after all others. Users' code does not see it: its
`state.<variable>` works on a `StampedTable`, which adds the column to what is put and omits it from what is returned.
The stamp is a step's clock, rounded down to 1/64 of the TTL. So a row that is written in every step changes its place
in the time index at most 64 times per TTL, and stamps compress well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys, Lookup, StateTable
from siltstone.state.columns import fixed_values, null_mask, one_array
from siltstone.state.schema import WRITTEN_AT, TableSchema
from siltstone.state.wrapped_table import WrappedTable
from siltstone.time.clock_rules import FOREVER
from siltstone.times import LONGEST, parse_duration, to_us

CLOCKS = ("event", "processing")
"""what a timer or a TTL goes by: the stream's watermark, or the time of day"""
RENEWALS = ("write", "read")
"""what makes a row's time to live begin again"""
STAMP = pa.field(WRITTEN_AT, pa.timestamp("us", "UTC"))
UNSTAMPED_DUE = -FOREVER
"""when a row without a stamp is due: at once"""
_PARTS = 64
"""stamps are multiples of this part of the TTL"""
_FIRST, _LAST = to_us(datetime(100, 1, 1, tzinfo=UTC)), to_us(datetime.max.replace(tzinfo=UTC))


def check_clock(clock: str, what: str) -> None:
    """Check that a clock is one of `CLOCKS`.

    Raises:
        UsageError: it is not.
    """
    if clock not in CLOCKS:
        raise UsageError(f"the clock of {what} is {clock!r}: use 'event' or 'processing'")


@dataclass(frozen=True)
class TTL:
    """How long a state variable keeps a row after it was last written: `ttl=st.TTL("30 days")`.

    Each row has its own time: each key of a `ValueState`, entry of a `MapState`, row of a `ListState` or `WindowState`.
    An expired row is deleted at the end of a step, after `process` and timers. Until then it is read like any other.

        visits = st.ValueState({"count": pa.int64()}, ttl=st.TTL("30 days"))

    The time is kept in one more column of the table, `written_at`, rounded down to 1/64 of `after`. So a row may expire
    earlier than `after` by that much. The column is in what `siltstone restore` writes. Rows without it, such as those
    that are older than the TTL, get it in the next step and begin their time then.

    By event time, a row's time begins at the watermark of the step that writes it, and the rows of that step may be far
    ahead of it. So `after` must be longer than the event time that a micro-batch spans.

    `after`, `clock` and `renew` may change between two runs. The column must stay once it is there: to keep rows for
    ever again, use `TTL(None)`.

    Attributes:
        after: how long rows are kept, such as "30 days" or a `timedelta`; None to keep them for ever.
        clock: "event" for the watermark (`EventTime`), or "processing" for the time of day. The end of a stream
            (`siltstone run --finish`) is the end of event time: all rows with a TTL by it expire.
        renew: what begins a row's time again: "write", or "read" for reads as well.

    Raises:
        UsageError: `after` is not a length of time, is 0 or over 365,000 days, or another argument is unknown.
    """

    after: str | timedelta | None
    clock: str = CLOCKS[0]
    renew: str = RENEWALS[0]

    def __post_init__(self) -> None:
        if self.after is not None and not timedelta(0) < parse_duration(self.after) <= LONGEST:
            raise UsageError(
                f"a TTL of {self.after!r}: use more than 0 and at most {LONGEST.days} days, or None to keep rows for "
                "ever"
            )
        check_clock(self.clock, "a TTL")
        if self.renew not in RENEWALS:
            raise UsageError(f"renew of a TTL is {self.renew!r}: use 'write' or 'read'")

    @property
    def after_us(self) -> int | None:
        """How long rows are kept, in microseconds; None for ever."""
        return None if self.after is None else parse_duration(self.after) // timedelta(microseconds=1)

    def stamp_of(self, clock_us: int | None) -> int | None:
        """Return the stamp of rows that are written in a step (microseconds since 1970); None if they have none.

        Args:
            clock_us: the step's time by `clock`; None if there is no watermark yet.
        """
        if self.after_us is None or clock_us is None:
            return None
        part = max(1, self.after_us // _PARTS)
        return min(max(clock_us, _FIRST), _LAST) // part * part


def with_stamp(values: pa.Table, schema: TableSchema, stamp: int | None) -> pa.Table:
    """Return value columns with the stamp, in place of the one that they have or after the last."""
    column = pa.repeat(pa.scalar(stamp, STAMP.type), len(values))
    columns = [*values.columns[: len(schema.value) - 1], column]
    return pa.Table.from_arrays(columns, schema=schema.value)


class StampedTable(WrappedTable):
    """A state table without the stamp of the one that it wraps: `put` adds it, `get` leaves it out.

    `changes` has it, since changes are logged.

    Args:
        table: its last value column is the stamp.
        stamp: that of the step (`TTL.stamp_of`); None for none.

    Attributes:
        renewing: whether a `get` now renews the rows that it finds, if the TTL says so.
    """

    def __init__(self, table: StateTable, ttl: TTL, stamp: int | None) -> None:
        super().__init__(table)
        full = table.schema
        self.schema = TableSchema(full.key, full.subkey, pa.schema(list(full.shown_value)[:-1]))
        self._stamp = stamp
        self.renewing = False
        self._renews = ttl.renew == RENEWALS[1]

    def get(self, batch: Keys) -> Lookup:
        """Return the rows of many keys, without their stamps, and renew them if the TTL says so."""
        lookup = self.table.get(batch)
        if self._renews and self.renewing and self._stamp is not None and len(batch):
            self._renew(batch, lookup, self._stamp)
        return self._without_stamp(lookup)

    def peek(self, batch: Keys) -> Lookup:
        """Return the rows of many keys, without their stamps, and renew none."""
        return self._without_stamp(self.table.get(batch))

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key, with the step's stamp."""
        self.table.put(batch, with_stamp(values, self.table.schema, self._stamp))

    def scan(self, groups: KeyGroupRange, *, in_order: bool = True) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """See `StateTable.scan`."""
        for rows, owners in self.table.scan(groups, in_order=in_order):
            yield rows.select(self.schema.rows.names), owners

    def _without_stamp(self, lookup: Lookup) -> Lookup:
        return Lookup(lookup.found, lookup.values.select(self.schema.value.names))

    def _renew(self, batch: Keys, lookup: Lookup, stamp: int) -> None:
        """Write the rows that were found again, if their stamps are older than the step's."""
        stamps = one_array(lookup.values.column(WRITTEN_AT))
        older = lookup.found & (null_mask(stamps) | (fixed_values(stamps).view(np.int64) < stamp))
        if older.all():
            self.table.put(batch, with_stamp(lookup.values, self.table.schema, stamp))
        elif older.any():
            which = np.flatnonzero(older)
            values = lookup.values.take(pa.array(which))
            self.table.put(batch.take(which), with_stamp(values, self.table.schema, stamp))


def read_table(table: StateTable, keys: Keys, *, renews: bool) -> Lookup:
    """Read rows of a table; unless it `renews`, they do not live longer for it."""
    return table.peek(keys) if isinstance(table, StampedTable) and not renews else table.get(keys)
