"""Nested values (structs and lists) as bytes: what state tables store, compare and digest of them.

A value becomes one sequence of bytes that depends on the value alone, not on how Arrow lays it out: what is below a
null, where a slice begins, which of the NaNs it is. So each backend and stored format has a nested column as a column
of binary values, and its digest is that of the bytes.

    struct    each field's slots, one field after the other
    list      the number of elements (uint32); their slots
    slots     for n values: n bytes, 1 or 0 for null; then those that are not null, together:
              integers, floats, decimals, dates, timestamps: their little-endian bytes; each NaN is Java's
              booleans: a byte, 1 or 0
              strings, binary: their lengths (uint32); their bytes
              structs: each field's slots
              lists: their numbers of elements (uint32); the slots of all elements

A sequence has as many parts as its type, so that both directions are a few vectorized passes for any number of
values. In Arrow a null struct takes memory for each of its fields: a value whose nulls take more than `RATIO` times its
bytes is padded with zeros, and a shorter one is refused. So the length of the bytes bounds the memory of the value.

A column of structs whose values never need that (`is_open`) leaves out the slots of each value's last fields that are
null. So the type may get more fields at its end: the bytes of older values, and with them their digests, are those of
values whose new fields are null. (As columns that were added to a table, they take memory without bytes.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as of_each
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.decoding import RATIO, translate_decode_errors
from siltstone.errors import UsageError
from siltstone.state.columns import canonical_bits, fixed_values, null_mask, one_array, spans

_BYTES_MAX = (1 << 31) - 1
_COUNT = np.dtype("<u4")
_BINARY = pa.binary()
_PIECE_BYTES = 16 << 20


def encode_nested(array: pa.Array) -> pa.Array:
    """Return the bytes of each value (binary), null where it is null.

    Args:
        array: of a type that `state.types.checked_type` returned.

    Raises:
        UsageError: they take 2 GiB or more.
    """
    absent = null_mask(array)
    present = array.filter(pa.array(~absent)) if absent.any() else array
    out = _Writer(len(present))
    if is_open(array.type):
        out.fields(present)
    else:
        out.values(present, np.arange(len(present)))
    return _spread_values(out.join(), ~absent)


def decode_nested(array: pa.Array, kind: pa.DataType, name: str = "a nested value") -> pa.Array:
    """Return the values whose bytes `encode_nested` returned.

    Raises:
        CorruptObject: the bytes are not of values of this type; the message contains `name`.
    """
    with translate_decode_errors(name, f"values of type {kind}"):
        absent = null_mask(array)
        present = array.filter(pa.array(~absent)) if absent.any() else array
        read = _Reader(*spans(present))
        values = read.fields(kind) if is_open(kind) else read.values(kind, np.ones(len(present), np.int64))
        read.end()
        values.validate(full=True)
        return _spread_values(values, ~absent)


@dataclass(frozen=True, eq=False)
class _Writer:
    """Collects the parts of `rows` values: bytes in the order of the values, and how many each value has (int64)."""

    rows: int
    parts: list[tuple[np.ndarray, np.ndarray]] = of_each(default_factory=list)
    null_bytes: list[np.ndarray] = of_each(default_factory=list)

    def fields(self, array: pa.Array) -> None:
        """Add structs, none null, one to a row, without their last fields that are null."""
        children, some = array.flatten(), np.zeros(self.rows, bool)
        wanted = []
        for child in reversed(children):
            some = some | ~null_mask(child)
            wanted.append(some)
        for child, rows in zip(children, reversed(wanted), strict=True):
            self._slots(child if rows.all() else child.filter(pa.array(rows)), np.flatnonzero(rows))

    def values(self, array: pa.Array, owners: np.ndarray) -> None:
        """Add values of one type, none null; `owners` (int64[n], ascending) are the rows that they belong to."""
        kind = array.type
        if pa.types.is_struct(kind):
            for child in array.flatten():
                self._slots(child, owners)
        elif pa.types.is_list(kind):
            lengths = fixed_values(pc.list_value_length(array))
            self._add(lengths.astype(_COUNT), owners)
            self._slots(array.flatten(), np.repeat(owners, lengths))
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            data, _, lengths = spans(array)
            self._add(lengths.astype(_COUNT), owners)
            sizes = np.bincount(owners, lengths, self.rows).astype(np.int64)
            self.parts.append((data, sizes))
        else:
            values = fixed_values(array)
            self._add(canonical_bits(values, fold_zeros=False) if pa.types.is_floating(kind) else values, owners)

    def join(self) -> pa.Array:
        """Return the bytes of each value (binary).

        Raises:
            UsageError: they take 2 GiB or more.
        """
        none = np.zeros(self.rows, np.int64)
        used = sum((sizes for _, sizes in self.parts), none)
        padding = np.maximum(_least_bytes(sum(self.null_bytes, none)) - used, 0)
        if (used + padding).sum() > _BYTES_MAX:
            raise UsageError("nested values of 2 GiB cannot be put at once: put fewer rows")
        parts = [(data, sizes) for data, sizes in self.parts if len(data)]
        if padding.any():
            parts.append((np.zeros(padding.sum(), np.uint8), padding))
        columns = [] if parts else [_binary(np.zeros(0, np.uint8), none)]
        for is_fixed, some in groupby(parts, lambda part: bool((part[1] == part[1][0]).all())):
            if is_fixed:  # one column of them takes less time than several
                table = np.hstack([data.reshape(self.rows, -1) for data, _ in some])
                columns.append(_binary(table.reshape(-1), np.full(self.rows, table.shape[1])))
            else:
                columns += [_binary(data, sizes) for data, sizes in some]
        return columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, b"")  # pyright: ignore[reportAttributeAccessIssue]

    def _slots(self, array: pa.Array, owners: np.ndarray) -> None:
        absent = null_mask(array)
        self._add((~absent).astype(np.uint8), owners)
        if absent.any():
            self.null_bytes.append(_width(array.type) * np.bincount(owners[absent], minlength=self.rows))
            array, owners = array.filter(pa.array(~absent)), owners[~absent]
        self.values(array, owners)

    def _add(self, values: np.ndarray, owners: np.ndarray) -> None:
        size = values.dtype.itemsize * (values.shape[1] if values.ndim > 1 else 1)
        octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.parts.append((octets, size * np.bincount(owners, minlength=self.rows)))


class _Reader:
    """Reads the parts of many values; `data`, `starts` and `lengths` are where their bytes are (`columns.spans`)."""

    def __init__(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._data, self._starts, self._lengths = data, starts, lengths
        self._at = starts.copy()
        self._null_bytes = np.zeros(len(starts), np.int64)

    def fields(self, kind: pa.DataType) -> pa.Array:
        """Read structs, none null, one of each row, whose last fields may have been left out."""
        children, last_is_null = [], np.zeros(len(self._starts), bool)
        for each in kind:
            there = self._at < self._starts + self._lengths
            child = _spread_values(self._slots(each.type, there.astype(np.int64)), there)
            last_is_null = np.where(there, null_mask(child), last_is_null)
            children.append(child)
        if last_is_null.any():
            raise ValueError("a value has a null field at its end")
        return pa.StructArray.from_arrays(children, fields=list(kind))

    def values(self, kind: pa.DataType, counts: np.ndarray) -> pa.Array:
        """Read values of one type that are not null: `counts` (int64[rows]) of each row, one array for all."""
        total = int(counts.sum())
        if pa.types.is_struct(kind):
            fields = list(kind)
            children = [self._slots(each.type, counts) for each in fields]
            return pa.StructArray.from_arrays(children, fields=fields)
        if pa.types.is_list(kind):
            lengths, ends = self._counts(counts)
            elements = self._slots(kind.value_type, _sums(lengths, counts))
            return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), elements, type=kind)
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            lengths, ends = self._counts(counts)
            return _values_between(ends, self._take(_sums(lengths, counts)), kind)
        if pa.types.is_boolean(kind):
            data = np.packbits(self._flags(counts), bitorder="little")
        else:
            data = self._take(counts * (kind.bit_width // 8))
        return pa.Array.from_buffers(kind, total, [None, pa.py_buffer(data)])

    def end(self) -> None:
        """Check that everything was read."""
        used = self._at - self._starts
        if (self._lengths != np.maximum(used, _least_bytes(self._null_bytes))).any():
            raise ValueError("there are bytes after a value")

    def _slots(self, kind: pa.DataType, counts: np.ndarray) -> pa.Array:
        valid = self._flags(counts)
        if valid.all():
            return self.values(kind, counts)
        some = _sums(valid.astype(np.int64), counts)
        self._null_bytes += (counts - some) * _width(kind)
        if (_least_bytes(self._null_bytes) > self._lengths).any():
            raise ValueError("a value takes far more memory than its bytes allow")
        return _spread_values(self.values(kind, some), valid)

    def _flags(self, counts: np.ndarray) -> np.ndarray:
        flags = self._take(counts)
        if (flags > 1).any():
            raise ValueError("a byte that is 1 or 0 is another")
        return flags.astype(bool)

    def _counts(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read lengths (int64[n]); return them and their running sums from 0 on."""
        lengths = self._take(counts * _COUNT.itemsize).view(_COUNT).astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        if ends[-1] > len(self._data):
            raise ValueError("a length is beyond the value")
        return lengths, ends

    def _take(self, sizes: np.ndarray) -> np.ndarray:
        """Return the next `sizes` (int64[rows]) bytes of each row, together."""
        if (sizes > self._lengths - (self._at - self._starts)).any():
            raise ValueError("a value ends too early")
        before, self._at = self._at, self._at + sizes
        # Arrow copies ranges of bytes as values: every second one of those that these bounds are between.
        bounds = np.column_stack((before, self._at)).reshape(-1)
        ranges = _values_between(bounds, self._data).take(pa.array(np.arange(0, len(bounds), 2)))
        data, _, _ = spans(ranges)
        return data


def _binary(data: np.ndarray, sizes: np.ndarray) -> pa.Array:
    """Return `data` (uint8) as binary values of these sizes."""
    return _values_between(np.concatenate(([0], np.cumsum(sizes))), data)


def _values_between(bounds: np.ndarray, data: np.ndarray, kind: pa.DataType = _BINARY) -> pa.Array:
    """Return the bytes between each two of `bounds` (int64, ascending) as binary values, or as strings."""
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, max(len(bounds) - 1, 0), buffers)


def _spread_values(values: pa.Array, valid: np.ndarray) -> pa.Array:
    """Return the values where `valid` (bool[n]) is true, and null elsewhere."""
    if valid.all():
        return values
    return values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _sums(numbers: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sums of the first `counts[0]` numbers, of the next `counts[1]`, and so on."""
    sums = np.concatenate(([0], np.cumsum(numbers)))
    ends = np.cumsum(counts)
    return sums[ends] - sums[ends - counts]


def _least_bytes(null_bytes: np.ndarray) -> np.ndarray:
    """Return the least length of values whose nulls take this much memory."""
    return -(-null_bytes // RATIO)


def _width(kind: pa.DataType) -> int:
    """Return the bytes that a null takes in Arrow, at most."""
    if pa.types.is_struct(kind):
        return 1 + sum(_width(each.type) for each in kind)
    return 5 if is_variable(kind) else 1 + max(1, kind.bit_width // 8)


def is_open(kind: pa.DataType) -> bool:
    """Whether values of the type leave out their last fields that are null: it is a struct, and no value needs padding,
    because no struct within it takes much memory where it is null."""
    return pa.types.is_struct(kind) and not any(_has_wide_struct(each.type) for each in kind)


def _has_wide_struct(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_wide_struct(kind.value_type)
    return pa.types.is_struct(kind) and _width(kind) > RATIO  # it is wider than any within it


def has_more_fields(kind: pa.DataType, than: pa.DataType) -> bool:
    """Whether a nested type is another one with more fields at its end: the bytes of that one's values are those of its
    own, with the new fields null."""
    if not (is_open(kind) and is_open(than)):
        return False
    fields = list(kind)
    return len(fields) > than.num_fields and fields[: than.num_fields] == list(than)


def is_variable(kind: pa.DataType) -> bool:
    """Whether values of the type have lengths."""
    return pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_list(kind)


Nested = Sequence[tuple[str, pa.DataType]]
"""names and types of nested columns"""


def stored_columns(table: pa.Table, nested: Nested) -> pa.Table:
    """Replace nested columns by their bytes; other columns stay.

    Raises:
        UsageError: a column's values take 2 GiB or more.
    """
    return _replace_columns(table, nested, lambda array, kind: encode_nested(array), lambda kind: pa.binary())


def nested_columns(table: pa.Table, nested: Nested) -> pa.Table:
    """Replace bytes by the nested columns that they stand for; columns of `nested` that the table lacks are ignored.

    Raises:
        CorruptObject: the bytes are not of values of this type.
    """
    return _replace_columns(table, nested, decode_nested, lambda kind: kind)


def _replace_columns(
    table: pa.Table,
    nested: Nested,
    convert: Callable[[pa.Array, pa.DataType], pa.Array],
    kind_of: Callable[[pa.DataType], pa.DataType],
) -> pa.Table:
    for name, kind in nested:
        at = table.schema.get_field_index(name)
        if at >= 0:
            field, parts = table.schema.field(at).with_type(kind_of(kind)), _pieces(table.column(at))
            table = table.set_column(at, field, pa.chunked_array([convert(part, kind) for part in parts], field.type))
    return table


def _pieces(column: pa.ChunkedArray) -> Iterator[pa.Array]:
    """Split a column, so that the positions of its bytes take bounded memory; decode its dictionaries."""
    for chunk in column.chunks:
        array = one_array(chunk)
        rows = max(1, _PIECE_BYTES * len(array) // max(array.nbytes, 1))
        yield from (array.slice(first, rows) for first in range(0, len(array), rows))
