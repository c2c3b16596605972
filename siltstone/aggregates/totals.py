"""Several aggregate functions as one: rows are lifted to columns of state, reduced by group, and read as results."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from siltstone.aggregates.functions import Function, Overflow, Sum
from siltstone.errors import BadRow, UsageError
from siltstone.rows import Keys
from siltstone.state.access import conform
from siltstone.state.backend import Lookup
from siltstone.state.columns import find_misfits, fixed_values, null_mask, one_array
from siltstone.state.hashing import normalise_keys
from siltstone.state.nested import encode_nested, nested_columns
from siltstone.state.types import is_nested
from siltstone.state.variables import ValueState

PARTIAL = "__partial_"
"""prefix of the columns of state in rows that were aggregated before the shuffle"""


class Totals:
    """The functions of one operator. `what` begins error messages; `schema` has the columns of state."""

    def __init__(self, what: str, functions: Sequence[Function]) -> None:
        self.functions: tuple[Function, ...] = tuple(functions)
        self.schema: pa.Schema = pa.schema([pair for function in functions for pair in function.columns().items()])
        self.result_schema: pa.Schema = pa.schema([(each.name, each.result_type()) for each in functions])
        self._nested = [(field.name, field.type) for field in self.schema if is_nested(field.type)]
        self._what = what

    def parts(self, columns: list[pa.Array]) -> Iterator[tuple[Function, list[pa.Array]]]:
        """Yield each function with its columns of state."""
        start = 0
        for function in self.functions:
            end = start + len(function.columns())
            yield function, columns[start:end]
            start = end

    def read(self, table: pa.Table) -> list[pa.Array]:
        """Return the columns of state of rows, or of rows that were aggregated before the shuffle.

        Raises:
            UsageError, BadRow: see `lift`.
        """
        names = {f"{PARTIAL}{name}": name for name in self.schema.names}
        partial = [name for name in table.column_names if name in names]
        if not partial:
            return self.lift(table)
        given = table.select(partial).rename_columns([names[name] for name in partial])
        return [one_array(c) for c in conform(given, self.schema, table.num_rows, self._what).columns]

    def lift(self, table: pa.Table) -> list[pa.Array]:
        """Convert rows to columns of state.

        Raises:
            UsageError: a column is missing, or has another type.
            BadRow: values do not fit the type.
        """
        lifted: list[pa.Array] = []
        for function in self.functions:
            inputs = function.inputs()
            if not inputs:
                lifted.append(pa.array(np.ones(table.num_rows, np.int64)))
                continue
            missing = [name for name in inputs if name not in table.column_names]
            wanted = {
                name: kind or (pa.null() if missing else table.schema.field(name).type) for name, kind in inputs.items()
            }
            fitted = self._cast_inputs(table, pa.schema(list(wanted.items())))
            made = function.lift([one_array(column) for column in normalise_keys(fitted).columns])
            if [len(column) for column in made] != [table.num_rows] * len(function.columns()):
                names = ", ".join(function.columns())
                raise UsageError(
                    f"{self._what}: lift of {function.name} is to return {names} with a value for each row"
                )
            lifted += made
        return lifted

    def _cast_inputs(self, table: pa.Table, wanted: pa.Schema) -> pa.Table:
        """Cast the input columns of a function; a `BadRow` names the rows whose values do not fit."""
        try:
            return conform(table, wanted, table.num_rows, self._what)
        except UsageError as error:
            for field in wanted:
                if field.name in table.column_names:
                    bad = find_misfits(table.column(field.name), field.type)
                    if bad.any():
                        reason = f"{self._what}: column {field.name} does not fit {field.type}"
                        raise BadRow(str(error), rows=bad, reason=reason) from None
            raise

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        """Reduce columns of state to one row per group, of `size`.

        Raises:
            Overflow: a sum does not fit.
        """
        with self._explain_capacity():
            return [c for function, part in self.parts(columns) for c in function.reduce(part, group, size)]

    def join(self, old: list[pa.Array], new: list[pa.Array]) -> list[pa.Array]:
        """Return columns of state of two sets of rows as those of all.

        Raises:
            UsageError: a column takes 2 GiB or more.
        """
        with self._explain_capacity():
            return [pa.concat_arrays([before, column]) for before, column in zip(old, new, strict=True)]

    def take(self, columns: list[pa.Array], rows: np.ndarray) -> list[pa.Array]:
        """Return columns of state of some rows.

        Raises:
            UsageError: a column takes 2 GiB or more.
        """
        with self._explain_capacity():
            return [column.take(pa.array(rows)) for column in columns]

    @contextmanager
    def _explain_capacity(self) -> Iterator[None]:
        """Say what it means where Arrow refuses an array, since its lists and bytes have offsets of 31 bits."""
        try:
            yield
        except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
            raise UsageError(
                f"{self._what}: columns of state do not fit: {str(error).splitlines()[0]}",
                advice="keep what a call works on below 2 GiB: limit lists, or use smaller micro-batches",
            ) from error

    def merge(self, old: Lookup, new: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        """Reduce new rows together with the old rows of all groups.

        Raises:
            Overflow: a sum does not fit.
        """
        if old.found.any():
            new = self.join(self.of_state(old.values), new)
            group = np.concatenate([np.arange(size), group])
        return self.reduce(new, group, size)

    def of_state(self, values: pa.Table) -> list[pa.Array]:
        """Return the columns of state of rows of a table; nested ones may be as it stores them."""
        stored = [(name, kind) for name, kind in self._nested if values.schema.field(name).type != kind]
        return [one_array(column) for column in nested_columns(values.select(self.schema.names), stored).columns]

    def results(self, columns: list[pa.Array]) -> list[pa.Array]:
        """Compute the aggregates' values."""
        return [function.result(part) for function, part in self.parts(columns)]

    def check(self, values: pa.Table) -> None:
        """Check that given columns of state are such as reducing makes, so that further rows can be added to them.

        Raises:
            UsageError: they are not.
        """
        columns, rows = self.of_state(values), len(values)
        for function, part in self.parts(columns):
            what, names = f"{self._what}: {function.name}", ", ".join(function.columns())
            try:
                made = function.reduce(part, np.arange(rows), rows)
                function.result(made)
            except Exception as error:  # that of a user may raise any
                raise UsageError(f"{what} cannot go on with its state in {names}: {error}; correct it") from error
            if not all(map(_same, part, made)):
                raise UsageError(
                    f"{what} does not keep its state as it is given in {names}", advice="give what the state would hold"
                )

    def overflow_error(self, overflow: Overflow, keys: Keys, key_index: np.ndarray, group: np.ndarray) -> BadRow:
        """Make the error of an overflow, with the column and the first of the keys.

        All rows of such a group are bad, because which of them are too many depends on their order.

        Args:
            key_index, group: of each row, its key and its group.
        """
        rows = np.asarray(overflow.groups, bool)[group]
        named = np.zeros(len(keys), bool)
        named[key_index[rows]] = True
        message, advice, what = self._describe(overflow, keys, named)
        return BadRow(message, advice=advice, rows=rows, reason=what)

    def closing_error(self, overflow: Overflow, keys: Keys, key_index: np.ndarray) -> BadRow:
        """Make the error of an overflow at the end of a window, for which no single row can be blamed.

        Args:
            key_index: the key of each group.
        """
        named = np.zeros(len(keys), bool)
        named[key_index[np.asarray(overflow.groups, bool)]] = True
        message, advice, _ = self._describe(overflow, keys, named)
        return BadRow(message, advice=advice)

    def _describe(self, overflow: Overflow, keys: Keys, named: np.ndarray) -> tuple[str, str, str]:
        function = overflow.function
        kept = next(iter(function.columns().values()))
        way = "on_overflow='null' or " if isinstance(function, Sum) else ""
        what = f"{self._what}: {function.name} of column {function.of} leaves {kept}"
        return f"{what} for {keys.describe(named)}", f"use {way}a type with more room", what


def _same(one: pa.Array, other: pa.Array) -> bool:
    if is_nested(one.type):
        return encode_nested(one).equals(encode_nested(other))
    if pa.types.is_floating(one.type):
        absent = null_mask(one)
        return np.array_equal(absent, null_mask(other)) and np.array_equal(
            fixed_values(one)[~absent], fixed_values(other)[~absent], equal_nan=True
        )
    return one.equals(other)


@dataclass(frozen=True)
class TotalsState(ValueState):
    """The columns of state of an aggregate without windows."""

    totals: Totals = field(kw_only=True, compare=False, repr=False)

    def layout(self) -> str:
        return ValueState.__name__

    def check_edit(self, puts: pa.Table) -> None:
        self.totals.check(puts)
