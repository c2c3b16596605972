"""Fixed-width records of one table: conversion of Arrow columns to records and back.

The fields of a record, widest first so that each is aligned:

    digest  u64   of the row; 0 if it is deleted
    f0..fn        the columns: fixed-width values as in Arrow (decimal128 two words, bool one byte), strings and
                  binary as a u64 entry of the table's arena
    mark    u32   the interval of change tracking in which the row last changed; 0 before any
    group   u16   key group
    live    u8    1, or 0 if the row is deleted
    nulls   u8[]  one bit per value column, then one per nullable key column, set if it is null
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.state.backends.heap.arena import EMPTY, Arena
from siltstone.state.columns import fixed_values, null_mask, one_array
from siltstone.state.schema import TableSchema


def _is_variable(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_binary(kind)


def _stored_type(kind: pa.DataType) -> np.dtype:
    """Return the type of a value in a record: its bits, so that keys compare as integers."""
    if _is_variable(kind):
        return np.dtype(np.uint64)
    if pa.types.is_decimal128(kind):
        return np.dtype((np.uint64, (2,)))
    width = 1 if pa.types.is_boolean(kind) else kind.bit_width // 8
    return np.dtype(f"u{width}")


class Layout:
    """The record of a table schema. `dtype` is the record; `opaque` the same bytes as one item, which NumPy
    gathers and scatters with one copy per row.
    """

    def __init__(self, schema: TableSchema) -> None:
        self.keys = [(f"f{i}", field) for i, field in enumerate(schema.primary_key)]
        self.values = [(f"f{i + len(self.keys)}", field) for i, field in enumerate(schema.value)]
        nullable = [i for i, (_, field) in enumerate(self.keys) if field.nullable]
        self._bit = {i: len(self.values) + nth for nth, i in enumerate(nullable)}
        """of each nullable key column, the position of its bit in `nulls`"""
        self.variable_columns = sum(_is_variable(field.type) for _, field in [*self.keys, *self.values])
        fields: list[tuple[str, np.dtype]] = [("digest", np.dtype(np.uint64))]
        fields += [(name, _stored_type(field.type)) for name, field in [*self.keys, *self.values]]
        fields += [
            ("mark", np.dtype(np.uint32)),
            ("group", np.dtype(np.uint16)),
            ("live", np.dtype(np.uint8)),
        ]
        fields.sort(key=lambda field: -field[1].base.itemsize)
        bits = len(self.values) + len(nullable)
        fields.append(("nulls", np.dtype((np.uint8, (max(1, -(-bits // 8)),)))))
        self._key_bits = np.zeros(max(1, -(-bits // 8)), np.uint8)
        for bit in self._bit.values():
            self._key_bits[bit // 8] |= np.uint8(1 << (bit % 8))
        width = sum(dtype.itemsize for _, dtype in fields)
        width = -(-width // 8) * 8
        offsets = np.cumsum([0, *(dtype.itemsize for _, dtype in fields[:-1])])
        self.dtype = np.dtype(
            {
                "names": [name for name, _ in fields],
                "formats": [dtype for _, dtype in fields],
                "offsets": [int(offset) for offset in offsets],
                "itemsize": width,
            }
        )
        self.opaque = np.dtype((np.void, width))

    def encode_keys(self, keys: pa.Table) -> list[pa.Array | np.ndarray]:
        """Encode normalised key columns for `have_keys` and `write_keys`: as stored bits, or the array itself; if
        columns are nullable, also which are null (uint8[n, width of `nulls`])."""
        columns = [one_array(keys.column(i)) for i in range(len(self.keys))]
        encoded = [_key_bits(column, field.type) for column, (_, field) in zip(columns, self.keys, strict=True)]
        if self._bit:
            nulls = np.zeros((len(keys), len(self._key_bits)), np.uint8)
            for i, bit in self._bit.items():
                if columns[i].null_count:
                    nulls[:, bit // 8] |= null_mask(columns[i]).astype(np.uint8) << np.uint8(bit % 8)
            encoded.append(nulls)
        return encoded

    def have_keys(self, block: np.ndarray, keys: Sequence[pa.Array | np.ndarray], arena: Arena) -> np.ndarray:
        """Return bool[n]: whether each record has the primary key of the same row of `keys`."""
        result = np.ones(len(block), np.bool_)
        for byte in np.flatnonzero(self._key_bits).tolist():
            result &= block["nulls"][:, byte] & self._key_bits[byte] == keys[-1][:, byte]
        for (name, _), key in zip(self.keys, keys, strict=False):
            if isinstance(key, np.ndarray):
                same = block[name] == key
                result &= same.all(axis=1) if same.ndim == 2 else same
            else:
                stored = arena.take(block[name])
                same = pc.equal(stored, key.cast(pa.binary()))  # pyright: ignore[reportAttributeAccessIssue]
                result &= same.to_numpy(zero_copy_only=False)
        return result

    def write_keys(
        self, block: np.ndarray, rows: np.ndarray, keys: Sequence[pa.Array | np.ndarray], arena: Arena
    ) -> None:
        """Set the key fields of records `rows` of the block from the same rows of `keys`."""
        if self._bit:
            block["nulls"][rows] = keys[-1][rows]
        for (name, _), key in zip(self.keys, keys, strict=False):
            if isinstance(key, np.ndarray):
                block[name][rows] = key[rows]
            else:
                block[name][rows] = arena.append(key.take(pa.array(rows)))

    def write_values(self, block: np.ndarray, values: pa.Table, arena: Arena) -> None:
        """Set the value fields and null bits of a block of records."""
        block["nulls"] &= self._key_bits
        for i, (name, field) in enumerate(self.values):
            column = one_array(values.column(i))
            bits = _bits(column, field.type)
            block[name] = bits if isinstance(bits, np.ndarray) else arena.append(column)
            if column.null_count:
                block["nulls"][:, i // 8] |= null_mask(column).astype(np.uint8) << np.uint8(i % 8)

    def clear_values(self, block: np.ndarray) -> None:
        """Make every value null, as in a deleted row."""
        block["nulls"] |= ~self._key_bits
        for name, field in self.values:
            block[name] = EMPTY if _is_variable(field.type) else 0

    def move_values(self, block: np.ndarray, source: Arena, target: Arena) -> None:
        """Copy the variable-length values of a block of records to another arena, and point the records to them."""
        for name, field in [*self.keys, *self.values]:
            if _is_variable(field.type):
                block[name] = target.append(source.take(np.ascontiguousarray(block[name])))

    def value_bytes(self, block: np.ndarray, arena: Arena) -> np.ndarray:
        """Return the bytes of strings and binary values of each record in a block: int64[n]."""
        sizes = np.zeros(len(block), np.int64)
        for name, field in [*self.keys, *self.values]:
            if _is_variable(field.type):
                sizes += arena.lengths(np.ascontiguousarray(block[name]))
        return sizes

    def read_keys(self, block: np.ndarray, arena: Arena) -> list[pa.Array]:
        """Return the primary-key columns of a block of records."""
        columns = []
        for i, (name, field) in enumerate(self.keys):
            valid = _not_set(block["nulls"], self._bit[i]) if i in self._bit else None
            columns.append(_array(block[name], field.type, None if valid is None or valid.all() else valid, arena))
        return columns

    def read_values(self, block: np.ndarray, arena: Arena, present: np.ndarray | None = None) -> list[pa.Array]:
        """Return the value columns of a block of records; all null where `present` (bool[n]) is False."""
        nulls = block["nulls"] if block["nulls"].any() else None
        columns = []
        for i, (name, field) in enumerate(self.values):
            valid = present
            if nulls is not None:
                set_here = _not_set(nulls, i)
                valid = set_here if present is None else set_here & present
            columns.append(_array(block[name], field.type, valid, arena))
        return columns


def _not_set(nulls: np.ndarray, bit: int) -> np.ndarray:
    """Return bool[n]: where a bit is not set."""
    return nulls[:, bit // 8] & np.uint8(1 << (bit % 8)) == 0


def _key_bits(column: pa.Array, kind: pa.DataType) -> pa.Array | np.ndarray:
    """Return a key column as `_bits` does, nulls as zeros or empty strings, so that equal keys are equally stored."""
    if not column.null_count:
        return _bits(column, kind)
    if _is_variable(kind):
        return column.fill_null(b"" if pa.types.is_binary(kind) else "")
    bits = np.array(_bits(column, kind))
    bits[null_mask(column)] = 0
    return bits


def _bits(column: pa.Array, kind: pa.DataType) -> pa.Array | np.ndarray:
    if _is_variable(kind):
        return column
    values = fixed_values(column)
    return values if values.ndim == 2 else values.view(_stored_type(kind))


def _array(stored: np.ndarray, kind: pa.DataType, valid: np.ndarray | None, arena: Arena) -> pa.Array:
    """Make an Arrow array of stored values; null where `valid` (bool[n]) is False."""
    count = len(stored)
    bitmap = None
    if valid is not None:
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    if _is_variable(kind):
        entries = stored if valid is None else np.where(valid, stored, np.uint64(EMPTY))
        _, offsets, data = arena.take(np.ascontiguousarray(entries)).buffers()
        return pa.Array.from_buffers(kind, count, [bitmap, offsets, data])
    if pa.types.is_boolean(kind):
        data = pa.py_buffer(np.packbits(stored, bitorder="little"))
    else:
        data = pa.py_buffer(np.array(stored))  # copies also a single record, which is contiguous already
    return pa.Array.from_buffers(kind, count, [bitmap, data])
