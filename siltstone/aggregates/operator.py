"""A ready-made operator: SQL's aggregates per key, with one row of state per key, computed by batches; also of windows.

    Aggregate(
        "routes",
        key={"origin": pa.string(), "dest": pa.string()},
        aggregates=[
            Count("flights"),
            Sum("delay_total", of="delay"),
            Last("plane", of="tailnum", type=pa.string(), by="event_time"),
        ],
    )

Every function lifts a row to columns of state and reduces many such rows to one. The old state, new rows and rows
aggregated before the shuffle (`map_side`) are reduced together, with one get and one put per batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.aggregates.functions import Average, Count, First, Function, Last, Max, Min, Overflow, Sum
from siltstone.aggregates.panes import PaneTotals
from siltstone.aggregates.sessions import SessionTotals
from siltstone.aggregates.totals import PARTIAL, Totals, TotalsState
from siltstone.aggregates.windowed import TIME, Windowed, WindowTotals
from siltstone.aggregates.windows import AlignedWindow, Cumulative, Session, Sliding, Tumbling, Window
from siltstone.errors import UsageError
from siltstone.operator import COMBINED_ROWS, SOURCE, Operator, Rows, State
from siltstone.state.access import conform
from siltstone.state.columns import fixed_values, null_mask, read_times
from siltstone.state.hashing import find_distinct, normalise_keys, xxhash64
from siltstone.state.reduction import extreme_by
from siltstone.state.time_index import DueRows
from siltstone.state.variables import ColumnTypes, schema_of

__all__ = [
    "Aggregate",
    "Average",
    "Count",
    "Cumulative",
    "First",
    "Last",
    "Max",
    "Min",
    "Session",
    "Sliding",
    "Sum",
    "Tumbling",
]

EMIT = ("close", "update")
"""when a window is returned"""
_SPARK_TYPES = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}


class Aggregate(Operator):
    """Aggregates the rows of each key, or of each key and window of event time.

    Without a window, the state is one row per key in the variable `totals`, with the functions' columns of state. With
    one, it is one per key and piece of the window (`siltstone.aggregates.windows`), and is removed once the last window
    that contains it has ended:

        st.Aggregate("visits", key={"page": pa.string()}, aggregates=[st.Count("n")],
                     window=st.Tumbling("10 minutes", on="at"))

    The output then has `window_start` (inclusive) and `window_end` (exclusive) between key and aggregates. A row counts
    in each window that contains it and has not ended; it is late if all have (`Stream.late`). A late row that is
    processed anyway makes a window of late rows alone, which closes in the same step.

    "The operator TopN" of other engines is this one with the function `TopN`: rows are ranked per key, or per key and
    window.

    Sums of floats depend on the order of additions. Within a call of `process`, values are added in ascending order.
    So that a task that runs twice makes the same calls, an operator with such sums orders its rows (`order_by`).
    With `map_side`, their last digits depend on how the source's rows were split, too: a replay that splits them
    differently does not prove.

    Args:
        name, key, reads: see `Operator`.
        nullable: see `Operator`; by default all key columns, as in SQL's GROUP BY.
        aggregates: the functions, with distinct names. `type` of a function is the type of its input column.
        output: whether `process` returns the keys of its rows with their new aggregates.
        map_side: whether rows are also aggregated before the shuffle (`combine`), which helps if keys are skewed: per
            key, or per key and pane of the windows; not for sessions.
        window: `Tumbling`, `Sliding`, `Cumulative` or `Session`. The column `on` must be the event time of the rows.
        emit: "close" returns a window once, when the watermark reaches its end. The output then has the event time
            `window_time`, the last microsecond of the window, so that other operators can read it; of sessions, it is
            `window_end`. "update" returns a window whenever rows have changed it, and not when it ends; not for
            sessions.

    Raises:
        UsageError: a function or another argument is missing or wrong.
    """

    keeps_key: bool = True
    totals: TotalsState | WindowTotals

    def __init__(
        self,
        name: str,
        key: ColumnTypes,
        aggregates: Sequence[Function],
        reads: str = SOURCE,
        output: bool = True,
        map_side: bool = False,
        nullable: Sequence[str] | None = None,
        window: Window | None = None,
        emit: str = EMIT[0],
    ) -> None:
        if not aggregates or not all(isinstance(function, Function) for function in aggregates):
            raise UsageError(f"operator {name} needs aggregates such as Count or Sum")
        self.name: str = name
        self.map_side: bool = map_side
        self.window: Window | None = window
        self.emit: str = emit
        self.aggregates: tuple[Function, ...] = tuple(aggregates)
        self._check_window(output)
        self._totals = totals = Totals(f"operator {name}", self.aggregates)
        keys = schema_of(key, f"the key of operator {name}")
        self._windowed = _windowed(window, keys, totals)
        self.totals = TotalsState(totals.schema, totals=totals) if self._windowed is None else self._windowed.variable
        closes = emit == EMIT[0]
        shown = pa.schema([*keys, *totals.result_schema])
        super().__init__(
            name=name,
            key=keys,
            nullable=keys.names if nullable is None else nullable,
            reads=reads,
            inputs=tuple(
                dict.fromkeys([*keys.names, *(c for f in self.aggregates for c in f.inputs()), *self._time_columns])
            ),
            order_by=self._order(keys),
            output=(shown if self._windowed is None else self._windowed.output(closes=closes)) if output else None,
            output_time=self._windowed.output_time if self._windowed is not None and closes else None,
            combined=_combined_schema(keys, self._time_columns, totals.schema) if map_side else None,
        )
        self._check_names(keys, totals)

    def combine(self, table: pa.Table) -> pa.Table:
        """Aggregate rows of the source to one row per key, or key and pane, as input of `process`.

        A null key is kept, also one that `process` refuses. Of a pane, the latest time is kept: its rows are in the
        same windows, so they are late together.

        Raises:
            UsageError: a column is missing or does not fit.
        """
        keys = normalise_keys(conform(table, self.key, table.num_rows, f"operator {self.name}"))
        first, group = find_distinct(xxhash64(keys.columns), keys.columns)
        times = [
            pa.array(read_times(table.column(name)), TIME, mask=null_mask(table.column(name)))
            for name in self._time_columns
        ]
        if self._windowed is not None:
            first, group = self._windowed.find_pieces(group, times[0])
        lifted = self._totals.lift(table)
        try:
            reduced = self._totals.reduce(lifted, group, len(first))
            fits = not any(_has_overflow(function, part) for function, part in self._totals.parts(reduced))
        except Overflow:
            fits = False
        if not fits:
            # The sum of all rows of a key may still fit, so pass on the single rows: `process` checks their sum.
            reduced = lifted
            first = group = np.arange(table.num_rows)
        latest = [extreme_by(at, group, len(first), largest=True) for at in times]
        own = [at for name, at in zip(self._time_columns, latest, strict=True) if name not in self.key.names]
        if times:
            own.append(pa.array(np.bincount(group, minlength=len(first))))
        columns = [*keys.take(pa.array(first)).columns, *own, *reduced]
        fitted = [c.cast(f.type) for c, f in zip(columns, self.combined, strict=True)]
        return pa.table(fitted, schema=self.combined)

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Merge rows of the source, or of `combine`, into the totals of their keys, or of their windows."""
        if self._windowed is not None:
            return self._windowed.process(rows, state, state.totals, updates=self.emit == "update")
        keys = rows.keys
        try:
            lifted = self._totals.read(rows.table)
            reduced = self._totals.merge(state.totals.lookup(keys), lifted, rows.key_index, len(keys))
        except Overflow as overflow:
            raise self._totals.overflow_error(overflow, keys, rows.key_index, rows.key_index) from None
        state.totals.put(keys, pa.table(reduced, schema=self._totals.schema))
        if self.output is None:
            return None
        return pa.table([*keys.columns.columns, *self._totals.results(reduced)], schema=self.output)

    def on_due(self, table: str, take: Callable[[int], DueRows], state: State) -> Iterator[pa.Table]:
        """Close the windows that have ended."""
        if self._windowed is None:
            return super().on_due(table, take, state)
        return self._windowed.close(take, state, state.totals, closes=self.emit == EMIT[0])

    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        """Return which rows are late: all windows that contain them had ended."""
        if self._windowed is None:
            return super().find_late(at, before_us)
        return self._windowed.find_late(at, before_us)

    def time_column(self, name: str) -> str | None:
        return None if self._windowed is None else self._windowed.on

    def definition(self) -> dict[str, Any]:
        """See `Operator.definition`; state of other windows does not fit, although its schema does.

        Nor does that of another `emit`: open windows would be left without a last row.
        """
        found = super().definition()
        if self._windowed is not None:
            found["variables"]["totals"]["kind"] += f" ({self._windowed.layout}, emit {self.emit})"
        return found

    def _order(self, key: pa.Schema) -> tuple[str, ...]:
        """Return the columns that fix the order in which floats are added; empty if there are none to add."""
        sums = [f for f in self.aggregates if isinstance(f, Sum | Average) and pa.types.is_floating(f.type)]
        if not sums:
            return ()
        columns = [f"{PARTIAL}{next(iter(f.columns()))}" if self.map_side else f.of for f in sums]
        return tuple(dict.fromkeys([*key.names, *columns, *self._time_columns]))

    @property
    def _time_columns(self) -> tuple[str, ...]:
        return () if self.window is None else (self.window.on,)

    def _check_window(self, output: bool) -> None:
        """Check the arguments that have to do with windows.

        Raises:
            UsageError: they do not fit.
        """
        what = f"operator {self.name}"
        if self.emit not in EMIT:
            raise UsageError(f"{what}: emit is {self.emit!r}: use {' or '.join(map(repr, EMIT))}")
        if self.window is None:
            if self.emit != EMIT[0]:
                raise UsageError(f"{what}: emit={self.emit!r} is for windows: give it a window, or leave it out")
            return
        if not isinstance(self.window, AlignedWindow | Session):
            raise UsageError(f"{what}: window is {self.window!r}: use Tumbling, Sliding, Cumulative or Session")
        if isinstance(self.window, Session) and self.emit == "update":
            raise UsageError(
                f"{what}: emit='update' is not for sessions, since one may become part of another: leave it out"
            )
        if isinstance(self.window, Session) and self.map_side:
            raise UsageError(f"{what} has sessions, so it cannot combine rows before the shuffle: leave out map_side")
        if not output:
            raise UsageError(f"{what} has a window, whose state ends with it: leave out output=False")

    def _check_names(self, keys: pa.Schema, totals: Totals) -> None:
        """Check that no name is used twice.

        Raises:
            UsageError: one is.
        """
        own = () if self._windowed is None else self._windowed.reserved
        if taken := sorted({*keys.names, *totals.schema.names, *totals.result_schema.names} & set(own)):
            raise UsageError(f"operator {self.name}: {', '.join(taken)} is a column of windows: use other names")
        given = [*keys.names, *(name for function in self.aggregates for name in function.inputs())]
        if taken := sorted({name for name in given if name.startswith(PARTIAL)}):
            raise UsageError(f"operator {self.name}: {taken[0]} is a name of Siltstone's own: rename the column")
        names = [*keys.names, *totals.result_schema.names]
        if len(set(names)) != len(names):
            raise UsageError(f"operator {self.name}: the names of keys and aggregates must be distinct")


def _windowed(window: Window | None, key: pa.Schema, totals: Totals) -> Windowed | None:
    if isinstance(window, AlignedWindow):
        return PaneTotals(window, key, totals)
    return SessionTotals(window, key, totals) if isinstance(window, Session) else None


def _combined_schema(key: pa.Schema, times: Sequence[str], kept: pa.Schema) -> pa.Schema:
    """Return the schema of what `combine` returns, in types that Spark has."""
    own = [*((name, TIME) for name in times if name not in key.names), (COMBINED_ROWS, pa.int64())] if times else []
    fields = [*((f.name, f.type) for f in key), *own, *((f"{PARTIAL}{f.name}", f.type) for f in kept)]
    return pa.schema([(name, _spark_type(kind)) for name, kind in fields])


def _spark_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_spark_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _spark_type(field.type)) for field in kind])
    return _SPARK_TYPES.get(kind, kind)


def _has_overflow(function: Function, reduced: list[pa.Array]) -> bool:
    """Whether a sum with on_overflow="null" overflowed in these rows."""
    return isinstance(function, Sum) and function.on_overflow == "null" and bool(fixed_values(reduced[1]).any())
