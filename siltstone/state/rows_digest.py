"""A digest of rows of any columns, which does not depend on their order: 64 bits, to tell whether rows come again.

It is the sum, modulo 2**64, of the digests of `state.digest`, so parts of the rows can be digested in different tasks.
State tables have few types of columns; rows of a source have all that Spark and Arrow have. Those are digested as the
value that holds the same: a time or duration as its integer, a map as the list of its entries, a nested value as its
bytes (`state.nested`). A column may become wider (`state.types.is_wider`) without another digest.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from siltstone.state.columns import null_mask, one_array
from siltstone.state.digest import row_digests
from siltstone.state.nested import encode_nested
from siltstone.state.types import is_flat

_BYTES = (
    *(pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary),
)
_LISTS = (pa.types.is_list, pa.types.is_large_list)
_PACKED = struct.Struct("<qQ16s")
_COUNTS = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64, pa.types.is_date64)


@dataclass(frozen=True)
class DigestedRows:
    """How many rows there were, and what: `sum(parts, DigestedRows())` is that of all parts together.

    Attributes:
        digest: uint64.
        columns: the names and types of their columns, as 16 hex digits; empty without rows. Rows of which these differ
            cannot be compared.
    """

    rows: int = 0
    digest: int = 0
    columns: str = ""

    @classmethod
    def of(cls, rows: pa.Table | pa.RecordBatch, told: Sequence[str] | None = None) -> Self:
        """Digest some rows.

        Args:
            told: the names of those columns that rows must have in common to be compared; None for all.
        """
        if not rows.num_rows:
            return cls()
        columns = [_as_digested(one_array(column)) for column in rows.columns]
        digests = row_digests(pa.table(columns, names=rows.schema.names))
        schema = rows.schema if told is None else pa.schema([rows.schema.field(name) for name in told])
        return cls(rows.num_rows, int(digests.sum(dtype=np.uint64)), _describe_columns(schema))

    def __add__(self, other: "DigestedRows") -> "DigestedRows":
        digest = (self.digest + other.digest) % (1 << 64)
        return DigestedRows(self.rows + other.rows, digest, self.columns or other.columns)

    def differs(self, other: "DigestedRows") -> bool:
        """Whether these are certainly other rows."""
        comparable = self.columns == other.columns
        return self.rows != other.rows or (comparable and self.digest != other.digest)

    def pack(self) -> bytes:
        """Return bytes for `unpack`."""
        return _PACKED.pack(self.rows, self.digest, self.columns.encode())

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Return what was packed."""
        rows, digest, columns = _PACKED.unpack(packed)
        return cls(rows, digest, columns.rstrip(b"\0").decode())


def _describe_columns(schema: pa.Schema) -> str:
    kinds = [f"{field.name}\0{_family(field.type)}" for field in schema]
    return xxhash.xxh3_64_hexdigest("\0".join(sorted(kinds)).encode())


def _family(kind: pa.DataType) -> str:
    """The types of which equal values have equal digests."""
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return "float"
    return f"decimal of scale {kind.scale}" if pa.types.is_decimal128(kind) else str(kind)


def _as_digested(array: pa.Array) -> pa.Array:
    """Return the values as a type that state tables have: nested ones as bytes."""
    plain = _plain(array)
    return encode_nested(plain) if pa.types.is_nested(plain.type) else plain


def _plain(array: pa.Array) -> pa.Array:
    """Return the values as flat types, and as structs and lists of these."""
    kind = array.type
    if is_flat(kind):
        return array
    if pa.types.is_struct(kind):
        fields = [_plain(field) for field in array.flatten()]
        names = [f"{place} {field.name}" for place, field in enumerate(kind)]
        return pa.StructArray.from_arrays(fields, names, mask=pa.array(null_mask(array)))
    if pa.types.is_map(kind):
        return _plain(array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))))
    if any(is_kind(kind) for is_kind in _LISTS):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0))  # pyright: ignore[reportAttributeAccessIssue]
        ends = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
        return pa.ListArray.from_arrays(ends, _plain(array.flatten()), mask=pa.array(null_mask(array)))
    if pa.types.is_null(kind):
        return pa.nulls(len(array), pa.int8())
    if any(is_kind(kind) for is_kind in _COUNTS):
        return array.view(pa.int64())
    if pa.types.is_time32(kind):
        return array.view(pa.int32())
    if any(is_kind(kind) for is_kind in _BYTES):
        return array.cast(pa.binary())  # of texts, too: whether they are UTF-8 is not checked here
    texts = [None if value is None else repr(value).encode() for value in array.to_pylist()]
    return pa.array(texts, pa.binary())
