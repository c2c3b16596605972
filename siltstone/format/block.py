"""A block: the changes of one table since its previous checkpoint, sorted by key group and compressed.

Every column becomes sequences of 64-bit numbers, and each sequence byte planes (`coding.Encoder.integers`): the
least number is subtracted, the rest is cut to the bytes it needs, and each byte position is compressed
separately with zstd. Bits are never changed: floats are stored as their bit patterns (including NaN payloads),
decimals as two words, booleans and validity as 0 and 1, strings as lengths and joined bytes. An integer-like
first column (the key) is sorted within each key group and stored as differences.

    "SILTBLK1" | header: rows, fields as JSON, first key group, rows per key group | columns | xxh3-64

A column is its validity, then its sequences; null values are stored as the column's least, or as the value before if it
is stored as differences, which costs almost nothing.
"""

import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siltstone.decoding import parse_json, translate_decode_errors
from siltstone.errors import UsageError
from siltstone.format.coding import KEY_GROUPS_MAX, Bytes, Decoder, Encoder, seal, unseal
from siltstone.state.ordering import stable_order
from siltstone.state.ranks import ranks
from siltstone.state.types import type_of

MAGIC = b"SILTBLK1"
_STRING_BYTES_MAX = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Block:
    """An encoded block: rows `offsets[i]:offsets[i + 1]` belong to key group `first_key_group + i`.

    `key_group_offsets` is uint32[n + 1] for the n key groups from the first to the last one with a change.
    """

    data: bytes
    first_key_group: int
    key_group_offsets: np.ndarray

    @property
    def rows(self) -> int:
        """The number of changes."""
        return int(self.key_group_offsets[-1])


def encode_block(changes: pa.Table, key_groups: np.ndarray, *, compression: bool = True) -> Block:
    """Encode `changes` (any columns that a `TableSchema` allows) with their `key_groups` (uint16[rows]).

    Rows are sorted by key group, and within one by the first column if it is integer-like. Without `compression`,
    byte planes and strings are stored uncompressed; decoding is the same.

    Raises:
        UsageError: a column's type is not allowed, or there is not one key group per row.
    """
    if len(changes) != len(key_groups):
        raise UsageError(f"{len(changes)} changes cannot have {len(key_groups)} key groups")
    batch, groups, ordered = _order(changes, key_groups.astype(np.uint16, copy=False))
    first = int(groups[0]) if len(groups) else 0
    counts = np.bincount(groups - np.uint16(first)) if len(groups) else np.zeros(0, np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.uint32)
    fields = json.dumps([[f.name, str(f.type), int(f.nullable)] for f in batch.schema], separators=(",", ":"))
    out = Encoder(compression=compression)
    out.claim(8 * batch.num_rows)
    out.varints([batch.num_rows, first, len(counts), int(ordered)])
    out.blob(fields.encode())
    out.integers(counts.astype(np.uint64))
    for i, column in enumerate(batch.columns):
        valid = None
        if column.null_count:
            [valid] = _words(column.is_valid())
            out.integers(valid)
        else:
            out.constant(1, len(column))
        _encode_column(out, column, valid, offsets if ordered and i == 0 else None)
    return Block(seal(out.finish(), MAGIC), first, offsets)


class OpenBlock:
    """An encoded block whose columns are decoded when they are asked for: the keys of a change tell whether its values
    are needed.

    `fields` are the original fields, and `key_groups` (uint16[rows], ascending) are the changes' key groups.

    Args:
        rows: the recorded number of changes; None does not compare.

    Raises:
        CorruptObject: cut, altered, not a block, or with another number of changes; the message contains `name`.
        NewerFormat: a newer Siltstone wrote it.
    """

    def __init__(self, data: Bytes, name: str = "a block", rows: int | None = None) -> None:
        self._name = name
        with self._translate():
            read = self._read = Decoder(unseal(data, MAGIC, name), name)
            count, first, spread, ordered = read.count(), read.count(), read.count(), read.count()
            if rows is not None and count != rows:
                raise read.damage_error(f"it has {count} changes, but {rows} are recorded")
            if first + spread > KEY_GROUPS_MAX:
                raise read.damage_error(f"it has key groups up to {first + spread}")
            read.claim(8 * count)
            fields = _fields(bytes(read.blob()))
            counts = read.integers(spread)
            if counts.sum() != count or (spread and counts.max() > count):
                raise read.damage_error("its key groups do not add up")
            self.fields = pa.schema(fields)
            self.key_groups = np.repeat(np.arange(first, first + spread, dtype=np.uint16), counts.astype(np.int64))
            self._offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.uint32) if ordered else None
            self._starts = []
            for field in fields:
                self._starts.append(read.position)
                read.skip_integers()
                _skip_column(read, field.type)

    def decode(self, names: Collection[str]) -> pa.Table:
        """Decode the columns that are among `names`, with their original types and nullability.

        Raises:
            CorruptObject: a column is damaged, or together they take more memory than the block's length pays for.
        """
        with self._translate():
            read, count, columns = self._read, len(self.key_groups), []
            fields = [(i, field) for i, field in enumerate(self.fields) if field.name in names]
            for i, field in fields:
                read.position = self._starts[i]
                valid = read.integers(count).astype(bool)
                columns.append(_decode_column(read, field.type, valid, self._offsets if i == 0 else None))
            table = pa.Table.from_arrays(columns, schema=pa.schema([field for _, field in fields]))
            table.validate(full=True)
            if fields and len(table) != count:
                raise read.damage_error(f"its columns have {len(table)} values instead of {count}")
            return table

    def _translate(self) -> AbstractContextManager[None]:
        return translate_decode_errors(self._name, "a block of changes")


def decode_block(data: Bytes, name: str = "a block", rows: int | None = None) -> tuple[pa.Table, np.ndarray]:
    """Decode all changes and their key groups (uint16[rows], ascending).

    Raises:
        CorruptObject, NewerFormat: see `OpenBlock`.
    """
    block = OpenBlock(data, name, rows)
    return block.decode(block.fields.names), block.key_groups


def _fields(text: bytes) -> list[pa.Field]:
    fields = [pa.field(name, type_of(kind), bool(nullable)) for name, kind, nullable in parse_json(text)]
    if len({field.name for field in fields}) < len(fields):
        raise ValueError("two columns have one name")
    return fields


def _order(changes: pa.Table, groups: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray, bool]:
    """Return one batch in block order, its key groups, and whether the first column is sorted within each group."""
    batch = _one_batch(changes)
    rank = ranks(groups, batch.column(0)) if batch.num_columns and batch.num_rows else None
    ordered = rank is not None
    if rank is None:
        rank = groups
    if not (rank[1:] >= rank[:-1]).all():
        order = stable_order(rank)
        batch, groups = batch.take(pa.array(order)), groups[order]
    return batch, groups, ordered


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise UsageError("one block cannot hold 2 GiB of strings in one column: checkpoint more often")
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _least_word(numbers: np.ndarray, kind: pa.DataType) -> np.uint64:
    """Return the least of uint64 words that represent values of `kind`, in the order of `kind`."""
    if pa.types.is_unsigned_integer(kind) or pa.types.is_boolean(kind):
        return numbers.min()
    return np.int64(numbers.view(np.int64).min()).view(np.uint64)


def _buffer(column: pa.Array, width: int) -> pa.Buffer:
    """Return the value bytes of a fixed-width array."""
    values = column.buffers()[1] or pa.py_buffer(b"")
    return values.slice(column.offset * width, len(column) * width)


def _words(column: pa.Array) -> list[np.ndarray]:
    """Convert a fixed-width column to sequences of uint64, sign-extended: one, or low and high word for a decimal."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return _words(column.cast(pa.uint8()))
    width = kind.bit_width // 8
    buffer = _buffer(column, width)
    if pa.types.is_decimal128(kind):
        pairs = np.frombuffer(buffer, np.uint64).reshape(-1, 2)
        return [pairs[:, 0].copy(), pairs[:, 1].copy()]
    sign = "u" if pa.types.is_unsigned_integer(kind) or pa.types.is_floating(kind) else "i"
    numbers = np.frombuffer(buffer, f"<{sign}{width}")
    return [numbers.astype(np.int64, copy=False).view(np.uint64) if sign == "i" else numbers.astype(np.uint64)]


def _encode_column(out: Encoder, column: pa.Array, valid: np.ndarray | None, starts: np.ndarray | None) -> None:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        ends = np.frombuffer(column.buffers()[1] or b"", np.int32)
        ends = ends[column.offset : column.offset + len(column) + 1]
        out.integers(np.diff(ends).astype(np.uint64))
        data = column.buffers()[2] if len(ends) else None
        out.blob(memoryview(data)[ends[0] : ends[-1]] if data is not None else b"")
        return
    if not (pa.types.is_primitive(kind) or pa.types.is_decimal128(kind)):
        raise UsageError(f"a block cannot hold a column of type {kind}")
    for word in _words(column):
        numbers = word
        if not len(numbers):
            out.constant(0, 0)
            continue
        if valid is not None:
            some = numbers[valid.astype(bool)]
            least = _least_word(some, kind) if len(some) else np.uint64(0)
            numbers = np.where(valid, numbers, least)
            if starts is not None:
                numbers = numbers[np.maximum.accumulate(np.where(valid, np.arange(len(numbers)), 0))]
        least = _least_word(numbers, kind)
        shifted = numbers - least
        if starts is not None:
            heads = starts[:-1][np.diff(starts) > 0]
            steps = np.diff(shifted, prepend=np.uint64(0))
            steps[heads] = shifted[heads]
            shifted = steps
        out.planes(shifted, int(least))


def _skip_column(read: Decoder, kind: pa.DataType) -> None:
    """Step over what `_decode_column` reads."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        read.skip_integers()
        read.skip_blob()
        return
    for _ in range(2 if pa.types.is_decimal128(kind) else 1):
        read.skip_integers()


def _decode_column(read: Decoder, kind: pa.DataType, valid: np.ndarray, starts: np.ndarray | None) -> pa.Array:
    rows = len(valid)
    validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        lengths = read.integers(rows)
        data = pa.py_buffer(read.blob())
        if data.size > _STRING_BYTES_MAX or (rows and lengths.max() > data.size) or int(lengths.sum()) != data.size:
            raise read.damage_error("its strings do not add up")
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return pa.Array.from_buffers(kind, rows, [validity, pa.py_buffer(ends), data])
    words = []
    for _ in range(2 if pa.types.is_decimal128(kind) else 1):
        shifted, least = read.planes(rows)
        if starts is not None and rows:
            sums = np.cumsum(shifted)
            before = np.concatenate(([np.uint64(0)], sums))[starts[:-1]]
            shifted = sums - np.repeat(before, np.diff(starts))
        words.append(shifted + np.uint64(least))
    if pa.types.is_boolean(kind):
        values = np.packbits(words[0].astype(bool), bitorder="little")
    elif pa.types.is_decimal128(kind):
        values = np.column_stack(words)
    else:
        values = words[0].astype(f"<u{kind.bit_width // 8}", copy=False)
    return pa.Array.from_buffers(kind, rows, [validity, pa.py_buffer(values)])
