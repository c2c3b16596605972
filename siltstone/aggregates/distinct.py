"""`ApproxDistinct`: about how many distinct values there are, in bounded state."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siltstone.aggregates.functions import Function
from siltstone.aggregates.hyperloglog import PRECISIONS, estimate, make_sketches, merge_sketches
from siltstone.errors import UsageError
from siltstone.state.columns import null_mask
from siltstone.state.hashing import xxhash64
from siltstone.state.types import is_flat


@dataclass(frozen=True)
class ApproxDistinct(Function):
    """About how many distinct values are not null (int64); 0 if there are none.

    The standard error is 1.04 / sqrt(2**precision), or 1.6 % at 12; it is less while there are fewer values than
    registers. Values are equal as in keys: 0.0 and -0.0 are, and all NaN.

    State: `<name>_hll<precision>` (binary), a HyperLogLog sketch of 4 bytes per distinct value, and at most
    2**precision bytes. Equal sets of values have equal bytes, in whatever order they came. The precision cannot change
    later, since it is part of the column's name.

    Args:
        of: the column.
        type: the type that it is cast to. A wider one later counts on; values of another type are other values.
        precision: from 4 to 16.

    Raises:
        UsageError: an argument is wrong.
    """

    of: str
    type: pa.DataType = pa.int64()  # noqa: RUF009  (Arrow types do not change)
    precision: int = 12

    def __post_init__(self) -> None:
        if type(self.precision) is not int or self.precision not in PRECISIONS:
            least, most = PRECISIONS[0], PRECISIONS[-1]
            raise UsageError(f"precision of {self.name} is {self.precision!r}: use a number from {least} to {most}")
        if not is_flat(self.type):
            raise UsageError(f"aggregate {self.name} cannot count values of type {self.type}: use a flat column")

    @property
    def _what(self) -> str:
        return f"aggregate {self.name}"

    def inputs(self) -> dict[str, pa.DataType | None]:
        return {self.of: _widest(self.type)}

    def columns(self) -> dict[str, pa.DataType]:
        return {f"{self.name}_hll{self.precision}": pa.binary()}

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        values = columns[0].view(pa.int64()) if pa.types.is_uint64(columns[0].type) else columns[0]
        return [make_sketches(xxhash64([values]), null_mask(values), self.precision)]

    def reduce(self, columns: list[pa.Array], group: np.ndarray, size: int) -> list[pa.Array]:
        return [merge_sketches(columns[0], group, size, self.precision, self._what)]

    def result(self, columns: list[pa.Array]) -> pa.Array:
        return pa.array(estimate(columns[0], self.precision, self._what))

    def result_type(self) -> pa.DataType:
        return pa.int64()


def _widest(kind: pa.DataType) -> pa.DataType:
    """Return the type as which values are hashed: that of all types that a column may become (`types.is_wider`)."""
    if pa.types.is_integer(kind):
        return kind if pa.types.is_uint64(kind) else pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    return pa.decimal128(38, kind.scale) if pa.types.is_decimal128(kind) else kind
