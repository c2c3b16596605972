"""`Deduplicate`: passes on the first row of each key, and leaves out those that repeat it within a length of time."""

from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.operator import SOURCE, Due, Operator, Rows, State, Timer
from siltstone.state.columns import null_mask, read_times
from siltstone.state.ordering import stable_order
from siltstone.state.variables import CLOCKS, ColumnTypes, schema_of
from siltstone.times import LONGEST, parse_duration

__all__ = ["Deduplicate"]

_TIME = pa.timestamp("us", "UTC")
_FAR = np.iinfo(np.int64).max


class Deduplicate(Operator):
    """Passes on each key's first row, and no other for `within` from its time on.

        Deduplicate("once", key={"id": pa.string()}, columns={"amount": pa.int64()}, on="at", within="1 hour")

    A row repeats the one that was passed on last if it is of the same key and less than `within` after it, or earlier.
    State is one time per key, and is removed once no row can repeat it any more. It is
    `dropDuplicatesWithinWatermark` of Spark, with a length of time of its own instead of the watermark's delay.

    Among rows of one step the earliest is the first one; of several, that with the least columns.

    Args:
        name, key, reads: see `Operator`.
        within: how long, such as "1 hour"; at most 365,000 days.
        on: the column with the event time; None for the time of day, with `clock="processing"`.
        columns: further columns of the rows that are passed on, `{name: type}`.
        clock: "event", or "processing": then a row's time is that of the step that reads it.

    Raises:
        UsageError: an argument is missing or wrong.
    """

    keeps_key: bool = True
    seen: Timer

    def __init__(
        self,
        name: str,
        key: ColumnTypes,
        within: str | timedelta,
        on: str | None = None,
        columns: ColumnTypes = pa.schema([]),  # noqa: B008  (Arrow schemas do not change)
        clock: str = CLOCKS[0],
        reads: str = SOURCE,
    ) -> None:
        if (on is None) == (clock == CLOCKS[0]):
            raise UsageError(f'operator {name}: give on, the column with the event time, or clock="processing"')
        self.on: str | None = on
        lasts = parse_duration(within)
        if not timedelta(0) < lasts <= LONGEST:
            raise UsageError(f"operator {name}: within is {within}: use more than 0, and at most {LONGEST.days} days")
        self._within = lasts // timedelta(microseconds=1)
        self.seen = Timer(clock)
        keys, further = schema_of(key, f"the key of operator {name}"), schema_of(columns, f"columns of operator {name}")
        times = [] if on is None else [pa.field(on, _TIME)]
        chosen = [*times, *further]
        if len({field.name for field in [*keys, *chosen]}) < len(keys) + len(chosen):
            raise UsageError(f"operator {name}: the names of key, on and columns must be distinct")
        super().__init__(
            name=name,
            key=keys,
            reads=reads,
            inputs=tuple(field.name for field in [*keys, *chosen]),
            order_by=tuple(field.name for field in chosen),
            output=pa.schema([*keys, *chosen]),
            output_time=on,
        )

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Return the rows that repeat none, and remember when they were."""
        at, until = self._read_times(rows, state), self._read_ends(state.seen.get(rows.keys))
        order = stable_order(rows.key_index, at)  # the operator's order decides among equal times
        at, owner = at[order], rows.key_index[order]
        passes = np.zeros(len(order), bool)
        while True:  # once for each row that a key passes on
            candidates = np.flatnonzero(~passes & (at >= until[owner]))
            first = candidates[np.flatnonzero(np.diff(owner[candidates], prepend=-1))]
            if not len(first):
                break
            passes[first] = True
            until[owner[first]] = np.minimum(at[first], _FAR - self._within) + self._within
        chosen = np.sort(order[passes])
        if not len(chosen):
            return None
        changed = np.unique(rows.key_index[chosen])
        state.seen.set(rows.keys.take(changed), pa.array(until[changed], _TIME))
        table = rows.table.take(pa.array(chosen)).select(self.output.names)
        return pa.table([c.cast(f.type) for c, f in zip(table.columns, self.output, strict=True)], schema=self.output)

    def on_timer(self, due: Due, state: State) -> None:
        """Forget the keys: no row can repeat theirs any more."""

    def _read_times(self, rows: Rows, state: State) -> np.ndarray:
        """Return each row's time (int64[n], microseconds since 1970)."""
        if self.on is None:
            return np.full(len(rows), state.clock.now_us)
        return read_times(rows.table.column(self.on))

    def _read_ends(self, times: Any) -> np.ndarray:
        """Return until when each key's rows repeat one (int64[n]); long ago for a key without one."""
        ends = read_times(times).copy()
        ends[null_mask(times)] = -_FAR
        return ends
