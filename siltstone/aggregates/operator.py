"""A ready-made operator: SQL's aggregates per key, with one row of state per key, computed by batches.

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

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from siltstone.aggregates.functions import Average, Count, First, Function, Last, Max, Min, Overflow, Sum
from siltstone.errors import BadRow, UsageError
from siltstone.operator import SOURCE, Operator, Rows, State, ValueState
from siltstone.state.access import conform
from siltstone.state.columns import find_misfits, fixed_values, one_array
from siltstone.state.hashing import find_distinct, normalise_keys, xxhash64
from siltstone.state.types import is_nested
from siltstone.state.variables import ColumnTypes, schema_of

__all__ = ["Aggregate", "Average", "Count", "First", "Last", "Max", "Min", "Sum"]

PARTIAL = "__partial_"
"""prefix of the columns of state in rows that were aggregated before the shuffle"""
_SPARK_TYPES = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}


class Aggregate(Operator):
    """Aggregates the rows of each key.

    The state is one row per key in the variable `totals`, with the functions' columns of state.

    Sums of floats depend on the order of additions. Within a call of `process`, values are added in ascending order.
    So that a task that runs twice makes the same calls, an operator with such sums orders its rows (`order_by`).

    Args:
        name, key, reads: see `Operator`.
        nullable: see `Operator`; by default all key columns, as in SQL's GROUP BY.
        aggregates: the functions, with distinct names. `type` of a function is the type of its input column.
        output: whether `process` returns the keys of its rows with their new aggregates.
        map_side: whether rows are also aggregated before the shuffle (`combine`), which helps if keys are skewed.

    Raises:
        UsageError: a function or another argument is missing or wrong.
    """

    totals: ValueState

    def __init__(
        self,
        name: str,
        key: ColumnTypes,
        aggregates: Sequence[Function],
        reads: str = SOURCE,
        output: bool = True,
        map_side: bool = False,
        nullable: Sequence[str] | None = None,
    ) -> None:
        if not aggregates or not all(isinstance(function, Function) for function in aggregates):
            raise UsageError(f"operator {name} needs aggregates such as Count or Sum")
        self.aggregates: tuple[Function, ...] = tuple(aggregates)
        self.map_side = map_side
        kept = [pair for function in self.aggregates for pair in function.columns().items()]
        for column, kind in kept:
            if is_nested(kind):
                raise UsageError(f"column {column} has type {kind}: aggregates are of flat values")
        self.totals = ValueState(pa.schema(kept))
        keys = schema_of(key, f"the key of operator {name}")
        results = [(function.name, function.result_type()) for function in self.aggregates]
        super().__init__(
            name=name,
            key=keys,
            nullable=keys.names if nullable is None else nullable,
            reads=reads,
            inputs=tuple(dict.fromkeys([*keys.names, *(c for f in self.aggregates for c in f.inputs())])),
            order_by=self._order(keys),
            output=pa.schema([*keys, *results]) if output else None,
            combined=_combined_schema(keys, self._state_schema) if map_side else None,
        )
        if len({*keys.names, *(name for name, _ in results)}) != len(keys.names) + len(results):
            raise UsageError(f"operator {name}: the names of keys and aggregates must be distinct")

    def combine(self, table: pa.Table) -> pa.Table:
        """Aggregate rows of the source to one row per key, as input of `process`.

        A null key is kept, also one that `process` refuses.

        Raises:
            UsageError: a column is missing or does not fit.
        """
        keys = normalise_keys(conform(table, self.key, table.num_rows, f"operator {self.name}"))
        first, group = find_distinct(xxhash64(keys.columns), keys.columns)
        lifted = self._lift(table)
        try:
            reduced = self._reduce(lifted, group, len(first))
            fits = not any(_has_overflow(function, part) for function, part in self._parts(reduced))
        except Overflow:
            fits = False
        if not fits:
            # The sum of all rows of a key may still fit, so pass on the single rows: `process` checks their sum.
            reduced, first = lifted, np.arange(table.num_rows)
        columns = [*keys.take(pa.array(first)).columns, *reduced]
        fitted = [c.cast(f.type) for c, f in zip(columns, self.combined, strict=True)]
        return pa.table(fitted, schema=self.combined)

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Merge rows of the source, or of `combine`, into the totals of their keys."""
        keys = rows.keys
        partial = any(name.startswith(PARTIAL) for name in rows.table.column_names)
        lifted, group = self._read_partials(rows.table) if partial else self._lift(rows.table), rows.key_index
        old = state.totals.lookup(keys)
        if old.found.any():
            lifted = [
                pa.concat_arrays([one_array(column), new])
                for column, new in zip(old.values.columns, lifted, strict=True)
            ]
            group = np.concatenate([np.arange(len(keys)), group])
        try:
            reduced = self._reduce(lifted, group, len(keys))
        except Overflow as overflow:
            raise self._bad_row_error(overflow, rows) from None
        state.totals.put(keys, pa.table(reduced, schema=self._state_schema))
        if self.output is None:
            return None
        results = [function.result(part) for function, part in self._parts(reduced)]
        return pa.table([*keys.columns.columns, *results], schema=self.output)

    @property
    def _state_schema(self) -> pa.Schema:
        return schema_of(self.totals.value, "")

    def _order(self, key: pa.Schema) -> tuple[str, ...]:
        """Return the columns that fix the order in which floats are added; empty if there are none to add."""
        sums = [f for f in self.aggregates if isinstance(f, Sum | Average) and pa.types.is_floating(f.type)]
        if not sums:
            return ()
        columns = [f"{PARTIAL}{next(iter(f.columns()))}" if self.map_side else f.of for f in sums]
        return tuple(dict.fromkeys([*key.names, *columns]))

    def _parts(self, columns: list[pa.Array]) -> Iterator[tuple[Function, list[pa.Array]]]:
        start = 0
        for function in self.aggregates:
            end = start + len(function.columns())
            yield function, columns[start:end]
            start = end

    def _lift(self, table: pa.Table) -> list[pa.Array]:
        lifted: list[pa.Array] = []
        for function in self.aggregates:
            inputs = function.inputs()
            if not inputs:
                lifted.append(pa.array(np.ones(table.num_rows, np.int64)))
                continue
            missing = [name for name in inputs if name not in table.column_names]
            wanted = {
                name: kind or (pa.null() if missing else table.schema.field(name).type) for name, kind in inputs.items()
            }
            fitted = self._cast_inputs(table, pa.schema(list(wanted.items())))
            lifted += function.lift([one_array(column) for column in normalise_keys(fitted).columns])
        return lifted

    def _cast_inputs(self, table: pa.Table, wanted: pa.Schema) -> pa.Table:
        """Cast the input columns of a function; a `BadRow` names the rows whose values do not fit."""
        what = f"operator {self.name}"
        try:
            return conform(table, wanted, table.num_rows, what)
        except UsageError as error:
            for field in wanted:
                if field.name in table.column_names:
                    bad = find_misfits(table.column(field.name), field.type)
                    if bad.any():
                        reason = f"{what}: column {field.name} does not fit {field.type}"
                        raise BadRow(str(error), rows=bad, reason=reason) from None
            raise

    def _read_partials(self, table: pa.Table) -> list[pa.Array]:
        names = {f"{PARTIAL}{name}": name for name in self._state_schema.names}
        given = table.select([name for name in table.column_names if name in names])
        given = given.rename_columns([names[name] for name in given.column_names])
        return [
            one_array(c) for c in conform(given, self._state_schema, table.num_rows, f"operator {self.name}").columns
        ]

    def _bad_row_error(self, overflow: Overflow, rows: Rows) -> BadRow:
        """Make the error of an overflow, with the column and the first of the keys.

        All rows of such a key are bad, because which of them are too many depends on their order.
        """
        function = overflow.function
        kept = next(iter(function.columns().values()))
        way = "on_overflow='null' or " if isinstance(function, Sum) else ""
        what = f"operator {self.name}: {function.name} of column {function.of} leaves {kept}"
        return BadRow(
            f"{what} for {rows.keys.describe(overflow.groups)}",
            advice=f"use {way}a type with more room",
            rows=np.asarray(overflow.groups, bool)[rows.key_index],
            reason=what,
        )

    def _reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        return [c for function, part in self._parts(columns) for c in function.reduce(part, group, size)]


def _combined_schema(key: pa.Schema, kept: pa.Schema) -> pa.Schema:
    """Return the schema of what `combine` returns, in types that Spark has."""
    fields = [(f.name, f.type) for f in key] + [(f"{PARTIAL}{f.name}", f.type) for f in kept]
    return pa.schema([(name, _SPARK_TYPES.get(kind, kind)) for name, kind in fields])


def _has_overflow(function: Function, reduced: list[pa.Array]) -> bool:
    """Whether a sum with on_overflow="null" overflowed in these rows."""
    return isinstance(function, Sum) and function.on_overflow == "null" and bool(fixed_values(reduced[1]).any())
