"""A digest of rows of any columns, which does not depend on their order: 64 bits, to tell whether rows come again.

It is the sum, modulo 2**64, of the digests of `state.digest`, so parts of the rows can be digested in different tasks.
State tables have few types of columns; rows of a source have all that Spark and Arrow have. Those are digested as the
value that holds the same: a time or duration as its integer, a map as the list of its entries, a nested value as its
bytes (`state.nested`). A column may become wider (`state.types.is_wider`) without another digest.

Bytes and texts are hashed in words of eight bytes, which takes half the time of the XXH64 that state has for them:

    h = 0x53696C7473746F6E + 0x9E3779B97F4A7C15 * length
    for each whole word, and then for the bytes that are left as a word:
        h ^= word;  h *= 0x9FB21C651E98DF25;  h ^= h >> 32

Those of `LONG_BYTES` or more are hashed by xxh3_64.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from siltstone.decoding import check_integer, check_text
from siltstone.state.columns import null_mask, one_array, spans
from siltstone.state.digest import row_digests
from siltstone.state.hashing import BLOCK
from siltstone.state.nested import encode_nested
from siltstone.state.types import is_flat

_BYTES = (
    *(pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary),
)
_LISTS = (pa.types.is_list, pa.types.is_large_list)
_ROWS_MAX = 1 << 63
_HEXADECIMAL = re.compile(r"(?:[0-9a-f]{16})?")
LONG_BYTES = 256
"""from this length on, a call of the C library for one value takes less time"""
_WORD = 8
_REST = np.array([(1 << 8 * count) - 1 for count in range(_WORD)], np.uint64)
"""keeps the first bytes of a word"""
_SEED, _LENGTH, _MULTIPLIER = (np.uint64(n) for n in (0x53696C7473746F6E, 0x9E3779B97F4A7C15, 0x9FB21C651E98DF25))
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
        return cls(rows.num_rows, int(digests.sum(dtype=np.uint64)), describe_columns(schema))

    def __add__(self, other: "DigestedRows") -> "DigestedRows":
        digest = (self.digest + other.digest) % (1 << 64)
        return DigestedRows(self.rows + other.rows, digest, self.columns or other.columns)

    def differs(self, other: "DigestedRows") -> bool:
        """Whether these are certainly other rows."""
        comparable = self.columns == other.columns
        return self.rows != other.rows or (comparable and self.digest != other.digest)

    def to_json(self) -> list[Any]:
        """Return a JSON value for `from_json`."""
        return [self.rows, f"{self.digest:016x}", self.columns]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return what `to_json` was called on.

        Raises:
            ValueError, TypeError: the value is damaged.
        """
        rows, digest, columns = value
        for text in (digest, columns):
            if not _HEXADECIMAL.fullmatch(check_text(text, "a digest")):
                raise ValueError(f"a digest is {text[:80]!r}")
        return cls(check_integer(rows, 0, _ROWS_MAX, "rows"), int(digest, 16), columns)


def describe_columns(schema: pa.Schema) -> str:
    """Describe the names and types of columns, as `DigestedRows.columns`."""
    kinds = [f"{field.name}\0{_family(field.type)}" for field in schema]
    return xxhash.xxh3_64_hexdigest("\0".join(sorted(kinds)).encode())


def _family(kind: pa.DataType) -> str:
    """Name the types of which equal values have equal digests. Zones, and Arrow's large types, depend on settings."""
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return "float"
    return f"decimal of scale {kind.scale}" if pa.types.is_decimal128(kind) else _exact_type(kind)


def _exact_type(kind: pa.DataType) -> str:
    """Name a type within another, whose bytes depend on widths, too."""
    if pa.types.is_timestamp(kind):
        return f"timestamp in {kind.unit}"
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "binary"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_exact_type(field.type)}' for field in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{_exact_type(kind.key_type)}, {_exact_type(kind.item_type)}>"
    return f"list<{_exact_type(kind.value_type)}>" if any(is_list(kind) for is_list in _LISTS) else str(kind)


def _as_digested(array: pa.Array) -> pa.Array:
    """Return the values as a type that state tables have: nested ones as bytes, and bytes as their hash."""
    plain = _plain(array)
    flat = encode_nested(plain) if pa.types.is_nested(plain.type) else plain
    return _hash_values(flat) if pa.types.is_string(flat.type) or pa.types.is_binary(flat.type) else flat


def _hash_values(array: pa.Array) -> pa.Array:
    """Return the hash of each string or binary value (int64), null where it is null."""
    data, starts, lengths = spans(array)
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    words, whole = np.ndarray(len(data) + 1, "<u8", buffer=padded, strides=(1,)), lengths // _WORD
    hashes, long = np.empty(len(array), np.uint64), np.flatnonzero(lengths >= LONG_BYTES)
    whole[long] = 0
    with np.errstate(over="ignore"):
        for at in range(0, len(array), BLOCK):
            block = slice(at, at + BLOCK)
            start, count, found = starts[block], whole[block], lengths[block].astype(np.uint64)
            found *= _LENGTH
            found += _SEED
            least, most = (int(count.min()), int(count.max()))
            for k in range(least):
                _add_words(found, words[start + _WORD * k])
            for k in range(least, most):
                rows = np.flatnonzero(count > k)
                some = found[rows]
                _add_words(some, words[start[rows] + _WORD * k])
                found[rows] = some
            rest = words[start + _WORD * count]
            rest &= _REST[lengths[block] % _WORD]
            _add_words(found, rest)
            hashes[block] = found
    for i in long.tolist():
        hashes[i] = xxhash.xxh3_64_intdigest(data[starts[i] : starts[i] + lengths[i]].tobytes())
    mask = null_mask(array) if array.null_count else None
    return pa.array(hashes.view(np.int64), pa.int64(), mask=mask)


def _add_words(hashes: np.ndarray, words: np.ndarray) -> None:
    hashes ^= words
    hashes *= _MULTIPLIER
    hashes ^= hashes >> np.uint64(32)


def _plain(array: pa.Array) -> pa.Array:
    """Return the values as flat types, and as structs and lists of these."""
    kind = array.type
    if is_flat(kind):
        return array
    if pa.types.is_struct(kind) and not kind.num_fields:
        return pa.array(np.ones(len(array), np.int8), mask=null_mask(array))
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
