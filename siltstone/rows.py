"""The argument `rows` of `Operator.process`: the rows of a call, their keys, and reductions per key.

    late = pc.greater(rows.table["delay"], 15)
    old = state.totals.get(rows.keys)                             # one row per key
    flights = rows.count(initial=old["flights"])                  # one value per key: the old count plus these rows
    minutes = rows.sum("delay", initial=old["minutes"])
    in_a_row = rows.running(late, restart=pc.invert(late))        # one value per row

Every method works on all keys of the call at once, in NumPy and Arrow. A reduction returns an Arrow array with one
value per key, in the order of `rows.keys`, which fits `state.<variable>.put(rows.keys, {...})`.

A `column` is the name of a column of the rows, or one value per row as an Arrow array, a NumPy array or a list.
`initial` is one value per key, usually from state, null if the key had none; it counts as one more value of the key,
before the rows. Nulls are skipped as by SQL's aggregates, and a key without any other value gets null. -0.0 counts as
0.0, and NaN is greater than every number, as in Spark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from siltstone.errors import BadRow, UsageError
from siltstone.state.backend import Keys
from siltstone.state.columns import find_misfits, null_mask, one_array
from siltstone.state.hashing import find_distinct, key_groups, normalise_keys, xxhash64
from siltstone.state.ordering import stable_order
from siltstone.state.reduction import choose_by, ends_by, extreme_by, running_by, sum_by, sum_type, take_or_null

__all__ = ["Due", "Keys", "Rows"]

Values: TypeAlias = Any
"""the name of a column of the rows, or one value per row: an Arrow array, a NumPy array or a list"""


@dataclass(frozen=True)
class Due:
    """The timers that fire in one call of `Operator.on_timer`. They are of one variable, and no longer in state.

    Attributes:
        timer: the name of the variable.
        keys: the n keys, in the order of `at`, then of their hashes.
        at: when each was due (timestamp, UTC), one per key.
    """

    timer: str
    keys: Keys
    at: pa.Array

    def __len__(self) -> int:
        return len(self.keys)


class Rows:
    """The rows of one call of `Operator.process`.

    Attributes:
        table: the rows (n), an Arrow table; key columns have the operator's types, with -0.0 as 0.0 and one NaN.
        hashes: uint64[n], Spark's xxhash64 of the key of each row.
        key_groups: uint16[n], the key group of each row.
    """

    def __init__(
        self,
        table: pa.Table,
        hashes: np.ndarray,
        groups: np.ndarray,
        key_names: Sequence[str],
        *,
        what: str = "rows",
        owners: np.ndarray | None = None,
        whole: bool = True,
        inputs: Mapping[str, Sequence[str]] | None = None,
        places: tuple[np.ndarray, int] | None = None,
    ) -> None:
        """Args:
        key_names: the columns that make up a key.
        what: how error messages begin.
        owners: uint64[n], the hash of each row's operator key, if `key_names` has more columns than the operator key.
        whole: whether these are all rows of a call.
        inputs: of several inputs, the names -> the columns that the operator names of them (`split_input`).
        places: of the rows of one input, their places among those of the call (int64[n]), and how many these are.
        """
        self.table: pa.Table = table
        self.hashes: np.ndarray = hashes
        self.key_groups: np.ndarray = groups
        self._key_names, self._what = list(key_names), what
        self._owners, self._whole = hashes if owners is None else owners, whole
        self._inputs, self._places = inputs or {}, places

    @classmethod
    def make(cls, operator: "_Keyed", table: pa.Table, hashes: np.ndarray | None, max_parallelism: int) -> "Rows":
        """Make the rows of an operator from a table; `hashes` are computed if None.

        Raises:
            BadRow: a key column that is not nullable has nulls.
            UsageError: a key column is missing or not of the declared type.
        """
        keys = normalise_keys(_key_columns(operator, table))
        for field in operator.key:
            table = table.set_column(table.column_names.index(field.name), field, keys.column(field.name))
        hashes = xxhash64(keys.columns) if hashes is None else hashes
        groups = key_groups(hashes, max_parallelism)
        inputs = {name: operator.columns_of(name) for name in operator.keyed_inputs} if operator.reads_several else None
        return cls(table, hashes, groups, keys.column_names, what=f"operator {operator.name}", inputs=inputs)

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def keys(self) -> Keys:
        """The distinct keys of the rows, in the order of their hashes, not of the rows."""
        return self._distinct[0]

    @property
    def key_index(self) -> np.ndarray:
        """int64[n]: the ordinal of each row's key in `keys`."""
        return self._distinct[1]

    # One value per key

    def count(self, column: Values = None, *, initial: Values = None) -> pa.Array:
        """Count each key's rows, or those in which `column` is not null; int64, never null."""
        index = self.key_index
        if column is not None:
            index = index[~null_mask(self._column(column))]
        counts = np.bincount(index, minlength=len(self.keys))
        if initial is not None:
            counts = counts + self._check_initial(initial, pa.int64()).fill_null(0).to_numpy()
        return pa.array(counts, pa.int64())

    def sum(self, column: Values, *, initial: Values = None) -> pa.Array:
        """Sum each key's values: int64 for integers and booleans (true counts 1), decimal128(38, scale) for decimals,
        float64 for floats.

        Sums of integers and decimals are exact. Floats are added in ascending order, so that the result does not
        depend on the order of the rows.

        Raises:
            BadRow: a sum does not fit its type. It names all rows of such keys.
        """
        array = self._cast_summable(column)
        array, index = self._with_initial(array, initial)
        sums, overflow = sum_by(array, index, len(self.keys))
        if overflow is not None:
            raise self._overflow_error(column, array.type, overflow)
        return sums

    def min(self, column: Values, *, initial: Values = None) -> pa.Array:
        """Return the least of each key's values."""
        array, index = self._with_initial(_fold_floats(self._column(column)), initial)
        return extreme_by(array, index, len(self.keys))

    def max(self, column: Values, *, initial: Values = None) -> pa.Array:
        """Return the greatest of each key's values."""
        array, index = self._with_initial(_fold_floats(self._column(column)), initial)
        return extreme_by(array, index, len(self.keys), largest=True)

    def first(self, column: Values, by: Values = None, *, initial: Values = None) -> pa.Array:
        """Return each key's first value that is not null, in the order of the rows or of the columns `by`.

        The order of the rows is the same in each run of a step only if the operator declares `order_by`. With `by`, one
        column or a tuple of columns compared one after the other, the order of the rows does not matter: of several
        first rows, the least value is taken. Rows that are null in one of `by` are skipped.

        Raises:
            UsageError: both `by` and `initial` are given.
        """
        return self._end(column, by, initial, last=False)

    def last(self, column: Values, by: Values = None, *, initial: Values = None) -> pa.Array:
        """Return each key's last value that is not null, like `first`; of several last rows by `by`, the greatest.

        Raises:
            UsageError: both `by` and `initial` are given.
        """
        return self._end(column, by, initial, last=True)

    def any(self, column: Values, *, initial: Values = None) -> pa.Array:
        """Return per key whether one of its values (booleans) is true."""
        array, index = self._with_initial(self._flags(column), initial)
        return extreme_by(array, index, len(self.keys), largest=True)

    def all(self, column: Values, *, initial: Values = None) -> pa.Array:
        """Return per key whether all its values (booleans) are true."""
        array, index = self._with_initial(self._flags(column), initial)
        return extreme_by(array, index, len(self.keys))

    # One value per row

    def running(self, column: Values = None, *, restart: Values = None, initial: Values = None) -> pa.Array:
        """Return for each row the sum of its key's values up to and including it, in the order of the rows; types as in
        `sum`.

        Without a column every value is 1, and the sum counts the key's rows. Floats are added one after the other. The
        sum is null until the first value that is not null.

        Args:
            restart: booleans; a true restarts the sum with this row's value.

        Raises:
            BadRow: a sum does not fit its type. It names all rows of such keys.
        """
        array = pa.array(np.ones(len(self), np.int64)) if column is None else self._cast_summable(column)
        again = np.zeros(len(self), np.bool_)
        if restart is not None:
            again = self._flags(restart).fill_null(False).to_numpy(zero_copy_only=False)
        array, index = self._with_initial(array, initial)
        ahead = len(array) - len(self)
        order = stable_order(index)
        begins = np.append(np.zeros(ahead, np.bool_), again)[order] | (np.diff(index[order], prepend=-1) != 0)
        first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        sums, overflow = running_by(array.take(pa.array(order)), first)
        if overflow is not None:
            keys = np.zeros(len(self.keys), np.bool_)
            keys[index[order[overflow]]] = True
            raise self._overflow_error(column, array.type, keys)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return sums.take(pa.array(back[ahead:]))

    # Other rows, other keys

    def of(self, name: str) -> "Rows":
        """Return the rows of one of several inputs; `keys` are those of these rows alone.

        Their `table` has the key's columns, by the operator's names, and the input's others. Without rows it is empty,
        and if the step does not know the input's types, its columns are of type null. The `table` that has the rows of
        all inputs has the key's columns and one struct per input, null in rows of the others.

        Raises:
            UsageError: the operator does not read several inputs, or not this one.
        """
        if name not in self._inputs:
            have = ", ".join(self._inputs) or "it reads one, whose rows these are"
            raise UsageError(f"{self._what} has no input {name!r} among several ({have})")
        places, table = split_input(self.table, name, self._key_names, self._inputs[name])
        hashes, groups = self.hashes[places], self.key_groups[places]
        owners = None if self._owners is self.hashes else self._owners[places]
        at = (places, len(self)) if self._whole else None
        return Rows(table, hashes, groups, self._key_names, what=self._what, owners=owners, whole=False, places=at)

    def by(self, *columns: str) -> "Rows":
        """Return the same rows under longer keys: the key and these columns.

        Use it to address entries of a `MapState`: `rows.by("route").keys.columns` is the table of distinct entries, and
        `rows.by("route").count()` counts their rows.

        Raises:
            UsageError: the rows have no such column.
        """
        hashes = xxhash64([self._column(name) for name in columns], self.hashes) if columns else self.hashes
        return self._derive(self.table, hashes, self.key_groups, self._owners, [*self._key_names, *columns])

    def filter(self, mask: Values) -> "Rows":
        """Return the rows for which `mask` (booleans) is true; its `keys` are only theirs."""
        kept = np.flatnonzero(self._flags(mask).fill_null(False).to_numpy(zero_copy_only=False))
        owners, table = self._owners[kept], self.table.take(pa.array(kept))
        return self._derive(table, self.hashes[kept], self.key_groups[kept], owners, self._key_names)

    def _derive(
        self, table: pa.Table, hashes: np.ndarray, groups: np.ndarray, owners: np.ndarray, names: Sequence[str]
    ) -> "Rows":
        whole = self._whole and table is self.table
        places = self._places if table is self.table else None
        given: Any = {"what": self._what, "inputs": self._inputs, "places": places}
        return Rows(table, hashes, groups, names, owners=owners, whole=whole, **given)

    @cached_property
    def _distinct(self) -> tuple[Keys, np.ndarray]:
        columns = normalise_keys(self.table.select(self._key_names))
        first, index = find_distinct(self.hashes, columns.columns)
        if self._owners is not self.hashes:
            # Entries of one operator key are kept together in state, so that they compress better once stored.
            order = stable_order(self._owners[first])
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            first, index = first[order], place[index]
        return Keys(columns.take(pa.array(first)), self.hashes[first], self.key_groups[first]), index

    def _column(self, column: Values) -> pa.Array:
        if isinstance(column, str):
            if column not in self.table.column_names:
                have = ", ".join(self.table.column_names)
                raise UsageError(f"{self._what}: the rows have no column {column} (they have {have})")
            return one_array(self.table.column(column))
        array = _array(column)
        if len(array) != len(self):
            raise UsageError(f"{self._what}: {len(array)} values were given for {len(self)} rows")
        return array

    def _flags(self, column: Values) -> pa.Array:
        array = self._column(column)
        if not pa.types.is_boolean(array.type):
            raise UsageError(f"{self._what}: {_label(column)} is of type {array.type}: booleans are needed here")
        return array

    def _cast_summable(self, column: Values) -> pa.Array:
        array = self._column(column)
        if pa.types.is_boolean(array.type):
            return array.cast(pa.int64())
        kind = sum_type(array.type, f"{self._what}: sum of {_label(column)}")
        if (bad := find_misfits(array, kind)).any():
            raise self._bad_row_error(f"{self._what}: {_label(column)} does not fit {kind}", bad)
        return _fold_floats(array.cast(kind))

    def check_fits(self, column: str, kind: pa.DataType, what: str) -> None:
        """Check that a column can be cast to a type without loss; a column that is missing is left to who reads it.

        Raises:
            BadRow: a value cannot.
        """
        if column not in self.table.column_names:
            return
        array = self._column(column)
        if array.type != kind and (bad := find_misfits(array, kind)).any():
            raise self._bad_row_error(f"{what} does not fit {kind}", bad)

    def _check_initial(self, initial: Values, kind: pa.DataType) -> pa.Array:
        array = _array(initial)
        if len(array) != len(self.keys):
            raise UsageError(f"{self._what}: initial has {len(array)} values for {len(self.keys)} keys")
        try:
            return _fold_floats(array if array.type == kind else array.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UsageError(f"{self._what}: initial is not {kind}: {str(error).splitlines()[0]}") from None

    def _with_initial(self, array: pa.Array, initial: Values) -> tuple[pa.Array, np.ndarray]:
        """Return the values and their keys' ordinals, those of `initial` first."""
        if initial is None:
            return array, self.key_index
        index = np.concatenate([np.arange(len(self.keys)), self.key_index])
        return pa.concat_arrays([self._check_initial(initial, array.type), array]), index

    def _end(self, column: Values, by: Values, initial: Values, *, last: bool) -> pa.Array:
        array = self._column(column)
        if by is None:
            array, index = self._with_initial(array, initial)
            return take_or_null(array, *ends_by(array, index, len(self.keys), last=last))
        if initial is not None:
            raise UsageError(
                f"{self._what}: first and last take either by or initial: initial has no value of by to compare with"
            )
        array = _fold_floats(array)
        orders = [self._column(each) for each in (by if isinstance(by, tuple) else (by,))]
        return take_or_null(array, *choose_by([*orders, array], self.key_index, len(self.keys), largest=last))

    def _overflow_error(self, column: Values, kind: pa.DataType, keys: np.ndarray) -> BadRow:
        what = f"{self._what}: the sum of {_label(column)} leaves {kind}"
        whose = f" for {self.keys.describe(keys)}"
        return self._bad_row_error(what, keys[self.key_index], whose, advice="use a type with more room")

    def _bad_row_error(self, reason: str, rows: np.ndarray, whose: str = "", *, advice: str = "") -> BadRow:
        """Make the error that names some rows, or, if these are not all rows of the call, their operator keys."""
        keys = None if self._whole else self._owners
        if self._places is not None:
            rows, keys = spread(rows, *self._places), None
        return BadRow(f"{reason}{whose}", advice=advice, rows=rows, reason=reason, keys=keys)


class _Keyed(Protocol):
    """What `Rows.of` needs of an operator."""

    name: str
    key: Any
    reads: Any

    @property
    def reads_several(self) -> bool: ...

    @property
    def input_names(self) -> tuple[str, ...]: ...

    @property
    def keyed_inputs(self) -> tuple[str, ...]: ...

    def columns_of(self, name: str) -> tuple[str, ...]: ...


def split_input(
    table: pa.Table, name: str, keys: Sequence[str], columns: Sequence[str] = ()
) -> tuple[np.ndarray, pa.Table]:
    """Return the rows of one of several inputs: their places in the table (int64[n]), and a table of the key's columns
    and those of the input, which the table has as the fields of a column of its name, null in rows of other inputs.

    Args:
        columns: the input's columns, for the empty table of a step that has no row of it and does not know its types.
    """
    if name not in table.column_names:
        nothing = {**{key: table.column(key)[:0] for key in keys}, **{each: pa.nulls(0) for each in columns}}
        return np.empty(0, np.int64), pa.table(nothing)
    column = one_array(table.column(name))
    places = np.flatnonzero(~null_mask(column))
    own = column if len(places) == len(column) else column.take(pa.array(places))
    names = [field.name for field in column.type]
    fields = own.flatten() if len(places) else [pa.nulls(0, field.type) for field in column.type]
    chosen = table.select(keys)
    chosen = chosen if len(places) == len(column) else chosen.take(pa.array(places))
    further = [(each, of) for each, of in zip(names, fields, strict=True) if each not in keys]
    return places, pa.table(
        [*chosen.columns, *(of for _, of in further)], names=[*chosen.column_names, *(each for each, _ in further)]
    )


def spread(found: np.ndarray, places: np.ndarray | None, count: int) -> np.ndarray:
    """Spread a mask of the rows at some places (bool[n]) to all `count` rows; without places, it is of all."""
    if places is None:
        return found
    whole = np.zeros(count, bool)
    whole[places] = found
    return whole


def _array(values: Values) -> pa.Array:
    return one_array(values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values))


def _label(column: Values) -> str:
    return f"column {column}" if isinstance(column, str) else "the values given"


def _fold_floats(array: pa.Array) -> pa.Array:
    """Return floats with -0.0 as 0.0 and one NaN; other values unchanged."""
    if not pa.types.is_floating(array.type):
        return array
    return one_array(normalise_keys(pa.table([array], names=["v"])).column(0))


def _show_inputs(operator: _Keyed) -> str:
    return " and ".join(operator.input_names)


def _key_columns(operator: _Keyed, table: pa.Table) -> pa.Table:
    """Return the key columns, each in one piece and of its declared type."""
    arrays = []
    for field in operator.key:
        what = f"operator {operator.name}: key column {field.name}"
        if field.name not in table.column_names:
            raise UsageError(f"{what} is missing in {_show_inputs(operator)} (it has {', '.join(table.column_names)})")
        array = one_array(table.column(field.name))
        if array.null_count and not field.nullable:
            raise BadRow(
                f"{what} is null in {array.null_count} of {len(array)} rows",
                advice="drop or fill them in the source, let null be a key (nullable), or let the stream set them "
                'aside (on_bad_row="dead-letter")',
            )
        try:
            arrays.append(array if array.type == field.type else array.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UsageError(f"{what} is not {field.type}: {str(error).splitlines()[0]}") from None
    return pa.table(arrays, schema=operator.key)
