"""SQL's aggregate functions over columns of state: lift a row, reduce rows, read the result.

Nulls are skipped as in SQL. For floats, -0.0 equals 0.0 and NaN is greater than every number, as in Spark. Results do
not depend on the order of the rows: ties are broken by value, and floats are added in ascending order.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.state.columns import fixed_values, null_mask
from siltstone.state.exact import means, to_decimal, to_words
from siltstone.state.reduction import choose_by, count_by, extreme_by, sum_by, sum_type, take_or_null
from siltstone.state.types import is_nested

EVENT_TIME = pa.timestamp("us", "UTC")
_WHOLE = pa.decimal128(38, 0)
"""has room for any sum of int64 values, because their number is an int64"""


class Overflow(Exception):
    """The sum of `function` does not fit its type in the groups where `groups` (bool[size]) is true."""

    def __init__(self, function: "Sum | Average", groups: np.ndarray) -> None:
        super().__init__(function.name)
        self.function: Sum | Average = function
        self.groups: np.ndarray = groups


@dataclass(frozen=True)
class Function(ABC):
    """An aggregate function whose result is the column `name`; subclass it to add one (`docs/structures.md`).

    Old state, new rows and rows that were combined before the shuffle are reduced together, in any order and any number
    of times: equal rows must come to equal bytes of state.
    """

    name: str

    @abstractmethod
    def inputs(self) -> dict[str, pa.DataType | None]:
        """Return the columns it reads and the types they are cast to; None for any type.

        If there are none, `lift` is not called: each row is a 1 (int64).
        """

    @abstractmethod
    def columns(self) -> dict[str, pa.DataType]:
        """Return the columns of its state and their types."""

    @abstractmethod
    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        """Convert input columns to columns of state, row by row."""

    @abstractmethod
    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        """Reduce columns of state to one row per group.

        Args:
            group: int[rows], the group of each row, below `size`.
            size: number of groups.
        """

    def result(self, columns: list[pa.Array]) -> pa.Array:
        """Compute the aggregate's value from its columns of state."""
        return columns[0]

    def result_type(self) -> pa.DataType:
        """Return the type of the value."""
        return self.columns()[self.name]


@dataclass(frozen=True)
class Count(Function):
    """The number of rows, or of those in which the column `of` is not null. State: `name` (int64)."""

    of: str | None = None

    def inputs(self) -> dict[str, pa.DataType | None]:
        return {} if self.of is None else {self.of: None}

    def columns(self) -> dict[str, pa.DataType]:
        return {self.name: pa.int64()}

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        return [pa.array((~null_mask(columns[0])).astype(np.int64))]

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        return [count_by(columns[0], group, size)]


@dataclass(frozen=True)
class _ColumnFunction(Function):
    """A function of one column, which is cast to `type`."""

    of: str
    type: pa.DataType = pa.int64()  # noqa: RUF009  (Arrow types do not change)

    def __post_init__(self) -> None:
        _check_flat(self.name, self.of, self.type)

    def inputs(self) -> dict[str, pa.DataType | None]:
        return {self.of: self.type}

    def columns(self) -> dict[str, pa.DataType]:
        return {self.name: self.type}

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        return columns


@dataclass(frozen=True)
class Sum(_ColumnFunction):
    """The sum of the values that are not null; null if there are none.

    State: `name`, of type int64 for integers, float64 for floats, decimal128(38, scale) for decimals. Each call of
    `process` checks once whether the sum of state and new rows fits.

    Args:
        on_overflow: what to do if the sum does not fit. "fail" raises `BadRow`; "null" makes it null from then on
            (state `<name>_overflowed`); "wrap" computes it modulo 2**64, for integers only.
    """

    on_overflow: str = "fail"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_overflow not in ("fail", "null", "wrap"):
            raise UsageError(f"on_overflow of {self.name} is {self.on_overflow!r}: use 'fail', 'null' or 'wrap'")
        if self.on_overflow == "wrap" and not pa.types.is_integer(self.type):
            raise UsageError(f"aggregate {self.name} adds up values of type {self.type}: only integers can wrap")

    def inputs(self) -> dict[str, pa.DataType | None]:
        return {self.of: sum_type(self.type, f"aggregate {self.name}")}

    def columns(self) -> dict[str, pa.DataType]:
        kept = {self.name: sum_type(self.type, f"aggregate {self.name}")}
        return kept | {f"{self.name}_overflowed": pa.bool_()} if self.on_overflow == "null" else kept

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        flags = [pa.array(np.zeros(len(columns[0]), np.bool_))] if self.on_overflow == "null" else []
        return [*columns, *flags]

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        sums, overflow = sum_by(columns[0], group, size)
        if self.on_overflow == "null":
            overflowed = np.zeros(size, np.bool_) if overflow is None else overflow
            flags = fixed_values(columns[1]).astype(np.bool_) & ~null_mask(columns[1])  # null for a new key
            overflowed[group[flags]] = True
            return [take_or_null(sums, np.arange(size), overflowed), pa.array(overflowed)]
        if overflow is not None and self.on_overflow == "fail":
            raise Overflow(self, overflow)
        return [sums]


@dataclass(frozen=True)
class Min(_ColumnFunction):
    """The least value that is not null. State: `name`. NaN is greater than every number."""

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        return [extreme_by(columns[0], group, size)]


@dataclass(frozen=True)
class Max(_ColumnFunction):
    """The greatest value that is not null. State: `name`. NaN is greater than every number."""

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        return [extreme_by(columns[0], group, size, largest=True)]


@dataclass(frozen=True)
class Average(_ColumnFunction):
    """The mean (float64) of the values that are not null.

    State: `<name>_count` and `<name>_sum`. The sum is exact for integers, as decimal128(38, 0), and for decimals, as
    decimal128(38, scale), where more digits raise `BadRow`. It is float64 for floats, as in Spark.
    """

    def inputs(self) -> dict[str, pa.DataType | None]:
        return {self.of: sum_type(self.type, f"aggregate {self.name}")}

    def columns(self) -> dict[str, pa.DataType]:
        kind = sum_type(self.type, f"aggregate {self.name}")
        return {f"{self.name}_sum": _WHOLE if pa.types.is_integer(kind) else kind, f"{self.name}_count": pa.int64()}

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        absent = null_mask(columns[0])
        values = columns[0]
        if pa.types.is_integer(values.type):
            values = to_decimal(to_words(fixed_values(values)), _WHOLE, absent if values.null_count else None)
        return [values, pa.array((~absent).astype(np.int64))]

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        sums, overflow = sum_by(columns[0], group, size)
        if overflow is not None:
            raise Overflow(self, overflow)
        return [sums, count_by(columns[1], group, size)]

    def result(self, columns: list[pa.Array]) -> pa.Array:
        count = fixed_values(columns[1])
        if columns[0].type == _WHOLE and pa.types.is_integer(self.type):
            return pa.array(means(fixed_values(columns[0]), count), mask=count == 0)
        total = fixed_values(columns[0].cast(pa.float64(), safe=False))
        return pa.array(total / np.maximum(count, 1), mask=count == 0)

    def result_type(self) -> pa.DataType:
        return pa.float64()


@dataclass(frozen=True)
class First(_ColumnFunction):
    """The non-null value of the row with the least `by`; the least one if there are several rows.

    State: `name` and `<name>_by`.
    """

    by: str = "event_time"
    by_type: pa.DataType = EVENT_TIME
    _largest: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_flat(self.name, self.by, self.by_type)
        if self.by == self.of:
            raise UsageError(f"aggregate {self.name} takes {self.of} by itself: use Min or Max")

    def inputs(self) -> dict[str, pa.DataType | None]:
        return {self.of: self.type, self.by: self.by_type}

    def columns(self) -> dict[str, pa.DataType]:
        return {self.name: self.type, f"{self.name}_by": self.by_type}

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        rows, absent = choose_by([columns[1], columns[0]], group, size, largest=self._largest)
        return [take_or_null(column, rows, absent) for column in columns]


@dataclass(frozen=True)
class Last(First):
    """The non-null value of the row with the greatest `by`; the greatest one if there are several rows.

    State: `name` and `<name>_by`.
    """

    _largest: ClassVar[bool] = True


def _check_flat(name: str, column: str, kind: pa.DataType) -> None:
    """Check that the values of a column have an order.

    Raises:
        UsageError: they are nested.
    """
    if is_nested(kind):
        raise UsageError(f"column {column} has type {kind}: aggregate {name} is of flat values")
