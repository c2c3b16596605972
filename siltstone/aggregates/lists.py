"""Functions that keep rows of a group as a list in one order: `CollectList`, and `TopN`, the first n of them.

The order is of all columns that are kept, so equal rows make equal lists, in whatever order they came.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.aggregates.functions import EVENT_TIME, Function
from siltstone.errors import UsageError
from siltstone.state.columns import fixed_values, null_mask
from siltstone.state.nested import encode_nested
from siltstone.state.reduction import distinct_in_order, first_in_order, sort_by
from siltstone.state.types import checked_type, is_nested
from siltstone.state.variables import ColumnTypes, schema_of


class _OrderedRows(Function):
    """Keeps the rows of a group as a list, in the order of `_kept`. State: `name`, the list."""

    @property
    @abstractmethod
    def _kept(self) -> pa.Schema:
        """The columns that are kept, the first being that of the order before all others."""

    @property
    @abstractmethod
    def _needed(self) -> str:
        """The column without whose value a row does not count."""

    @property
    @abstractmethod
    def _is_plain(self) -> bool:
        """Whether an element is the only column's value, rather than a struct."""

    @property
    @abstractmethod
    def _most(self) -> int | None:
        """How many rows are kept; None for all."""

    @abstractmethod
    def _choose(self, fields: list[pa.Array], group: np.ndarray) -> np.ndarray:
        """Return which rows are kept, by group and in their order."""

    def inputs(self) -> dict[str, pa.DataType | None]:
        return dict(zip(self._kept.names, self._kept.types, strict=True))

    def columns(self) -> dict[str, pa.DataType]:
        kept = self._kept
        return {self.name: pa.list_(kept.field(0).type if self._is_plain else pa.struct(list(kept)))}

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        there = ~null_mask(columns[self._kept.get_field_index(self._needed)])
        fields = columns if there.all() else [column.filter(pa.array(there)) for column in columns]
        return [self._make_lists(fields, there.astype(np.int64))]

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        owner = np.repeat(group, _lengths(columns[0]))
        fields = self._fields(columns[0])
        rows = self._choose(fields, owner)
        counts = np.bincount(owner[rows], minlength=size)
        return [self._make_lists([field.take(pa.array(rows)) for field in fields], counts)]

    def result(self, columns: list[pa.Array]) -> pa.Array:
        return self._make_lists(*self._shown(columns[0]))

    def _shown(self, lists: pa.Array) -> tuple[list[pa.Array], np.ndarray]:
        """Return all elements and the lengths of lists, of which an older one may have more rows than are kept now."""
        fields, lengths = self._fields(lists), _lengths(lists)
        if self._most is None or not (lengths > self._most).any():
            return fields, lengths
        rows = first_in_order(np.arange(int(lengths.sum())), np.repeat(np.arange(len(lengths)), lengths), self._most)
        return [field.take(pa.array(rows)) for field in fields], np.minimum(lengths, self._most)

    def _fields(self, lists: pa.Array) -> list[pa.Array]:
        """Return the columns of all elements."""
        elements = lists.flatten()
        return [elements] if self._is_plain else elements.flatten()

    def _make_lists(self, fields: list[pa.Array], lengths: np.ndarray) -> pa.Array:
        """Make lists of these lengths from the columns of all elements."""
        [kind] = self.columns().values()
        elements = fields[0] if self._is_plain else pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
        return _list_array(elements, lengths, kind)


@dataclass(frozen=True)
class CollectList(_OrderedRows):
    """The values that are not null, as a list in ascending order; empty if there are none.

    With `by`, the order is that of `by`, and of values where it is equal; rows without it come last. So the list does
    not depend on the order of the rows, as that of Spark's `collect_list` does. Nested values without `by` are in the
    order of their bytes, which is always the same and means nothing.

    State: `name`, the list, rewritten as a whole when it changes; with `by`, of structs. A list without `limit` grows
    with its group: keep what has no bound in a `ListState`.

    Args:
        of, type: the column, and the type that it is cast to.
        by, by_type: the column to sort by, flat, and its type.
        distinct: whether equal values are one; its place is that of the first.
        limit: how many are kept, from the first on; None for all.

    Raises:
        UsageError: an argument is wrong.
    """

    of: str
    type: pa.DataType = pa.int64()  # noqa: RUF009  (Arrow types do not change)
    by: str | None = None
    by_type: pa.DataType = EVENT_TIME
    distinct: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            _check_number(self.limit, f"limit of {self.name}")
        object.__setattr__(self, "type", checked_type(self.type, self.of, nested=True))
        if self.by is not None:
            _check_order(self.by, self.by_type, [self.of], f"aggregate {self.name}")

    @property
    def _kept(self) -> pa.Schema:
        order = [] if self.by is None else [(self.by, self.by_type)]
        return pa.schema([*order, (self.of, self.type)])

    @property
    def _needed(self) -> str:
        return self.of

    @property
    def _is_plain(self) -> bool:
        return self.by is None

    @property
    def _most(self) -> int | None:
        return self.limit

    def _choose(self, fields: list[pa.Array], group: np.ndarray) -> np.ndarray:
        rows = sort_by([_comparable(field) for field in fields], group)
        if self.distinct:
            rows = distinct_in_order(rows, _comparable(fields[-1]), group)
        return rows if self.limit is None else first_in_order(rows, group, self.limit)

    def result(self, columns: list[pa.Array]) -> pa.Array:
        fields, lengths = self._shown(columns[0])
        return _list_array(fields[-1], lengths, self.result_type())

    def result_type(self) -> pa.DataType:
        return pa.list_(self.type)


@dataclass(frozen=True)
class TopN(_OrderedRows):
    """The `n` rows with the greatest `by`, as a list of structs of `by` and the columns `of`, greatest first.

        st.TopN("best", 3, by="score", of={"player": pa.string()})

    Rows with an equal `by` are in ascending order of the other columns, null last, and rows without `by` are skipped.
    Equal rows count each. NaN is greater than every number.

    State: `name`, the list itself. If `n` grows later, lists grow from then on.

    Args:
        n: how many rows, at least 1.
        by, by_type: the flat column to sort by, and the type that it is cast to.
        of: further columns of a row, `{name: type}`.
        largest: False for the least `by` first.

    Raises:
        UsageError: an argument is wrong.
    """

    n: int
    by: str
    of: ColumnTypes = pa.schema([])  # noqa: RUF009  (Arrow schemas do not change)
    by_type: pa.DataType = pa.int64()  # noqa: RUF009
    largest: bool = True

    def __post_init__(self) -> None:
        _check_number(self.n, f"n of {self.name}")
        what = f"aggregate {self.name}"
        columns = schema_of(self.of, f"of of {what}")
        _check_order(self.by, self.by_type, columns.names, what)
        kinds = [(field.name, checked_type(field.type, field.name, nested=True)) for field in columns]
        object.__setattr__(self, "of", pa.schema(kinds))

    @property
    def _kept(self) -> pa.Schema:
        return pa.schema([(self.by, self.by_type), *schema_of(self.of, "")])

    @property
    def _needed(self) -> str:
        return self.by

    @property
    def _is_plain(self) -> bool:
        return False

    @property
    def _most(self) -> int | None:
        return self.n

    def _choose(self, fields: list[pa.Array], group: np.ndarray) -> np.ndarray:
        rows = sort_by([_comparable(field) for field in fields], group, largest=self.largest)
        return first_in_order(rows, group, self.n)


def _list_array(elements: pa.Array, lengths: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Make lists of these lengths from all their elements."""
    ends = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    return pa.ListArray.from_arrays(ends, elements, type=kind)


def _lengths(lists: pa.Array) -> np.ndarray:
    """Return how many elements each list has (int64[n]); 0 for null, such as where the column is newer than the row."""
    return fixed_values(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]


def _comparable(array: pa.Array) -> pa.Array:
    """Return values that can be sorted: of nested ones, their bytes."""
    return encode_nested(array) if is_nested(array.type) else array


def _check_number(number: int, what: str) -> None:
    if type(number) is not int or number < 1:
        raise UsageError(f"{what} is {number!r}: use a number of rows, at least 1")


def _check_order(by: str, kind: pa.DataType, others: list[str], what: str) -> None:
    """Check that rows can be sorted by a column, which is none of the others.

    Raises:
        UsageError: they cannot.
    """
    if by in others:
        raise UsageError(f"{what}: {by} is the column to sort by, and kept anyway: leave it out of the others")
    if is_nested(kind):
        raise UsageError(f"{what} cannot sort by column {by} of type {kind}: use a flat one")
    checked_type(kind, by, nested=False)
