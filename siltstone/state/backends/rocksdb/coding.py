"""Primary keys and rows of a table as RocksDB's keys and values, encoded and decoded many at once.

A key sorts as its row does in a base, by key group and then by primary key, so a scan needs no sorting:

    table     3 bytes, the table's prefix
    group     u16, big endian
    columns   each a marker, 0 or (if the value is null) 1, so that nulls come last, as Arrow sorts them; then
              - fixed-width types: big endian with the sign flipped, floats and decimals so that they sort as numbers
              - strings and binary: the bytes, with 0 as 0 255, ended by 0 0; plain and without an end if the column
                is the last and the only one of its kind
    lengths   u32 each: the encoded lengths of the ended columns, so that keys are split without a search. The ended
              columns before them differ if keys do, so lengths never decide the order.

A value is a fixed-width record (see `RowCoding`), then the bytes of the strings and binary values.

What is decoded may be crafted: lengths, markers and ends are checked before anything is read by them.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.state.backends.rocksdb.packing import (
    Packed,
    Part,
    edges,
    from_variable,
    head,
    join,
    lengths,
    split,
    to_variable,
)
from siltstone.state.columns import canonical_bits, fixed_values, null_mask, one_array
from siltstone.state.schema import TableSchema

PREFIX_BYTES = 3
GROUP_BYTES = 2
_LENGTH = np.dtype(">u4")
_ESCAPED, _END = b"\0\xff", b"\0\0"


def is_variable(kind: pa.DataType) -> bool:
    """Whether values of the type have no fixed width."""
    return pa.types.is_string(kind) or pa.types.is_binary(kind)


def width_of(kind: pa.DataType) -> int:
    """Return the bytes of a fixed-width value."""
    return 1 if pa.types.is_boolean(kind) else kind.bit_width // 8


class KeyCoding:
    """Encodes and decodes the keys of one table, whose keys all begin with `prefix` (3 bytes)."""

    def __init__(self, schema: TableSchema, prefix: bytes) -> None:
        self.prefix = prefix
        self._fields = list(schema.primary_key)
        self._kinds = [field.type for field in self._fields]
        variable = [i for i, kind in enumerate(self._kinds) if is_variable(kind)]
        self._ended = [] if variable == [len(self._kinds) - 1] else variable

    def group_start(self, group: int) -> bytes:
        """Return the least key of a key group."""
        # One more than the last key group is a bound too.
        return (int.from_bytes(self.prefix + bytes(GROUP_BYTES), "big") + group).to_bytes(5, "big")

    def encode(self, keys: pa.Table, groups: np.ndarray) -> Packed:
        """Encode normalised primary keys (`schema.primary_key`) and their key groups (uint16[n])."""
        count = len(groups)
        parts: list[Part] = [
            np.broadcast_to(np.frombuffer(self.prefix, np.uint8), (count, PREFIX_BYTES)),
            _bytes_of(groups.astype(">u2")),
        ]
        sizes = []
        for i, kind in enumerate(self._kinds):
            column = one_array(keys.column(i))
            absent = null_mask(column)
            parts.append(absent.astype(np.uint8).reshape(count, 1))
            if not is_variable(kind):
                parts.append(_to_sorted(column, absent))
                continue
            text = from_variable(column)
            if i in self._ended:
                text = _end(text)
                sizes.append(_bytes_of(lengths(text).astype(_LENGTH)))
            parts.append(text)
        return join([*parts, *sizes])

    def decode(self, packed: Packed) -> tuple[list[pa.Array], np.ndarray]:
        """Decode keys: the primary-key columns and the key groups (uint16[n]).

        Raises:
            ValueError: one is not a key of this table.
        """
        if np.any(head(packed, PREFIX_BYTES) != np.frombuffer(self.prefix, np.uint8)):
            raise ValueError("a key is of another table")
        fixed = sum(1 if is_variable(kind) else 1 + width_of(kind) for kind in self._kinds)
        fixed += PREFIX_BYTES + GROUP_BYTES + _LENGTH.itemsize * len(self._ended)
        ends = self._ended_lengths(packed)
        sizes: list[int | np.ndarray] = [PREFIX_BYTES, GROUP_BYTES]
        for i, kind in enumerate(self._kinds):
            rest = ends[i] if i in ends else lengths(packed) - fixed
            sizes += [1, rest if is_variable(kind) else width_of(kind)]
        parts = split(packed, [*sizes, *([_LENGTH.itemsize] * len(self._ended))])
        columns = []
        for i, kind in enumerate(self._kinds):
            marker, part = np.asarray(parts[2 + 2 * i]), parts[3 + 2 * i]
            if marker.any() and (marker.max() > 1 or not self._fields[i].nullable):
                raise ValueError(f"key column {self._fields[i].name} is null, or has another marker")
            valid = marker[:, 0] == 0 if marker.any() else None
            if isinstance(part, np.ndarray):
                columns.append(_from_sorted(part, kind, valid))
            else:
                columns.append(to_variable(_strip_end(part) if i in ends else part, kind, valid))
        return columns, group_numbers(packed)

    def _ended_lengths(self, packed: Packed) -> dict[int, np.ndarray]:
        back = len(self._ended) * _LENGTH.itemsize
        if not back:
            return {}
        head(packed, back)  # none is shorter
        data, found = edges(packed)
        tail = data[found[1:, None] + np.arange(-back, 0)].view(_LENGTH)
        return {column: tail[:, i].astype(np.int64) for i, column in enumerate(self._ended)}


def group_numbers(packed: Packed) -> np.ndarray:
    """Return uint16[n]: the key group of each encoded key."""
    start = head(packed, PREFIX_BYTES + GROUP_BYTES)
    return (start[:, PREFIX_BYTES].astype(np.uint16) << np.uint16(8)) | start[:, PREFIX_BYTES + 1]


class RowCoding:
    """Encodes and decodes the values of one table. `dtype` is the fixed-width record that each begins with:

    digest    u64   of the row
    mark      u32   the interval of change tracking in which the row last changed; 0 before any
    nulls     u8[]  one bit per value column, set if it is null
    f0..fn    the columns: fixed-width values as in Arrow (bool one byte), of strings and binary the length (u32)
    """

    def __init__(self, schema: TableSchema) -> None:
        self._kinds = [field.type for field in schema.value]
        fields: list[tuple] = [
            ("digest", "<u8"),
            ("mark", "<u4"),
            ("nulls", "u1", (max(1, -(-len(self._kinds) // 8)),)),
        ]
        for i, kind in enumerate(self._kinds):
            fields.append((f"f{i}", "<u4") if is_variable(kind) else (f"f{i}", f"V{width_of(kind)}"))
        self.dtype = np.dtype(fields)

    def encode(self, values: pa.Table, digests: np.ndarray, marks: np.ndarray | int) -> Packed:
        """Encode rows of `schema.value` with their digests and marks."""
        count = len(digests)
        records = np.zeros(count, self.dtype)
        records["digest"], records["mark"] = digests, marks
        texts: list[Part] = []
        for i, kind in enumerate(self._kinds):
            column = one_array(values.column(i))
            if column.null_count:
                records["nulls"][:, i // 8] |= null_mask(column).astype(np.uint8) << np.uint8(i % 8)
            if is_variable(kind):
                text = from_variable(column)
                records[f"f{i}"] = lengths(text)
                texts.append(text)
            else:
                records[f"f{i}"] = _bytes_of(fixed_values(column)).view(self.dtype[f"f{i}"])[:, 0]
        return join([_bytes_of(records), *texts])

    def records(self, packed: Packed) -> np.ndarray:
        """Return the records (`dtype`) that values begin with.

        Raises:
            ValueError: a value is shorter.
        """
        return np.ascontiguousarray(head(packed, self.dtype.itemsize)).view(self.dtype).reshape(-1)

    def decode(self, packed: Packed, records: np.ndarray) -> list[pa.Array]:
        """Decode the value columns of values and the records that they begin with.

        Raises:
            ValueError: a value is longer or shorter than its record says.
        """
        variable = [i for i, kind in enumerate(self._kinds) if is_variable(kind)]
        sizes = [records[f"f{i}"].astype(np.int64) for i in variable]
        texts = dict(zip(variable, split(packed, [self.dtype.itemsize, *sizes])[1:], strict=True))
        columns, nulls = [], records["nulls"]
        for i, kind in enumerate(self._kinds):
            absent = nulls[:, i // 8] & np.uint8(1 << (i % 8))
            valid = absent == 0 if absent.any() else None
            text = texts.get(i)
            if text is None:
                columns.append(_to_fixed(records[f"f{i}"], kind, valid))
            else:
                columns.append(to_variable(text, kind, valid))
        return columns


def expand(columns: Sequence[pa.Array], present: np.ndarray, back: np.ndarray | None = None) -> list[pa.Array]:
    """Return columns of the present rows (bool[n]) as columns of all rows, null in the others.

    Args:
        back: int64[n], which row to return in the place of each; if it is left out, they stay in order.
    """
    if back is None and present.all():
        return list(columns)
    rows = np.cumsum(present) - 1
    if back is not None:
        rows, present = rows[back], present[back]
    places = pa.array(rows, mask=~present)
    return [column.take(places) for column in columns]


def _bytes_of(values: np.ndarray) -> np.ndarray:
    """The bytes of each item or row: uint8[n, width]."""
    width = values.dtype.itemsize * int(np.prod(values.shape[1:]))
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), width)


def _end(text: Packed) -> Packed:
    """Escape and end byte strings, so that none is a prefix of another and their order stays."""
    if (edges(text)[0] == 0).any():
        text = pc.replace_substring(text, b"\0", _ESCAPED)  # pyright: ignore[reportAttributeAccessIssue]
    return join([text, np.zeros((len(text), len(_END)), np.uint8)])


def _strip_end(text: Packed) -> Packed:
    rest, end = split(text, [lengths(text) - len(_END), len(_END)])
    if np.any(np.asarray(end) != np.frombuffer(_END, np.uint8)):
        raise ValueError("a key has a string without an end")
    if (edges(rest)[0] == 0).any():  # pyright: ignore[reportArgumentType]
        return pc.replace_substring(rest, _ESCAPED, b"\0")  # pyright: ignore[reportAttributeAccessIssue]
    return rest  # pyright: ignore[reportReturnType]


def _to_sorted(column: pa.Array, absent: np.ndarray) -> np.ndarray:
    """Encode fixed-width values (uint8[n, width]) so that their bytes sort as they do; zeros where absent."""
    kind, values = column.type, fixed_values(column)
    if pa.types.is_decimal128(kind):
        words = values[:, ::-1].astype(">u8")  # the high word first
        words[:, 0] ^= np.uint64(1 << 63)
    elif pa.types.is_floating(kind):
        words = canonical_bits(values, fold_zeros=True)
        words = np.where(words >> _top(words), ~words, words | (words.dtype.type(1) << _top(words)))
    else:
        words = values.view(f"u{values.dtype.itemsize}")
        if values.dtype.kind == "i":
            words = words ^ (words.dtype.type(1) << _top(words))
    result = _bytes_of(words.astype(words.dtype.newbyteorder(">")))
    if absent.any():
        result[absent] = 0
    return result


def _from_sorted(part: np.ndarray, kind: pa.DataType, valid: np.ndarray | None) -> pa.Array:
    """Undo `_to_sorted`; null where `valid` is False."""
    if pa.types.is_decimal128(kind):
        words = np.ascontiguousarray(part).view(">u8").astype(np.uint64)
        words[:, 0] ^= np.uint64(1 << 63)
        return _to_fixed(np.ascontiguousarray(words[:, ::-1]), kind, valid)
    width = width_of(kind)
    words = np.ascontiguousarray(part).view(f">u{width}").astype(f"u{width}").reshape(-1)
    if pa.types.is_floating(kind):
        words = np.where(words >> _top(words), words ^ (words.dtype.type(1) << _top(words)), ~words)
    elif not (pa.types.is_boolean(kind) or pa.types.is_unsigned_integer(kind)):
        words = words ^ (words.dtype.type(1) << _top(words))
    return _to_fixed(words, kind, valid)


def _top(words: np.ndarray) -> np.generic:
    """The number of the highest bit, in the words' own type."""
    return words.dtype.type(words.dtype.itemsize * 8 - 1)


def _to_fixed(stored: np.ndarray, kind: pa.DataType, valid: np.ndarray | None) -> pa.Array:
    """Make an Arrow array of fixed-width values; null where `valid` (bool[n]) is False."""
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    is_bool = pa.types.is_boolean(kind)
    data = np.array(stored).view(np.uint8)
    data = np.packbits(data, bitorder="little") if is_bool else data
    return pa.Array.from_buffers(kind, len(stored), [bitmap, pa.py_buffer(data)])
