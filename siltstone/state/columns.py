"""Access the memory of Arrow columns from NumPy: values, byte ranges, nulls, the bits of floats."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.state.ordering import stable_order

Column: TypeAlias = pa.Array | pa.ChunkedArray
_DAY_US = 86_400_000_000
_DAYS_MAX = ((1 << 63) - 1) // _DAY_US


def one_array(column: Column) -> pa.Array:
    """Return the column as one contiguous array, with dictionaries decoded and large strings converted to strings."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_large_string(array.type):
        array = array.cast(pa.string())
    elif pa.types.is_large_binary(array.type):
        array = array.cast(pa.binary())
    return array


def is_micros(kind: pa.DataType) -> bool:
    """Whether the type is a timestamp in microseconds, the only kind that Spark and state tables use."""
    return pa.types.is_timestamp(kind) and kind.unit == "us"


def read_times(column: Column) -> np.ndarray:
    """Return the times of a column of timestamps or dates in microseconds since 1970, int64[n]; arbitrary where null.

    Days that microseconds have no room for are those at their bounds.
    """
    array = one_array(column)
    if pa.types.is_date32(array.type):
        return fixed_values(array).astype(np.int64).clip(-_DAYS_MAX, _DAYS_MAX) * _DAY_US
    if not is_micros(array.type):
        array = array.cast(pa.timestamp("us"), safe=False)
    return fixed_values(array).view(np.int64)


def null_mask(column: Column) -> np.ndarray:
    """Return bool[n]: where the column is null."""
    return column.is_null().to_numpy(zero_copy_only=False)


def find_misfits(column: Column, kind: pa.DataType) -> np.ndarray:
    """Return bool[n]: which values cannot be cast to the type; none, if the types cannot be cast at all."""
    if column.type == kind:
        return np.zeros(len(column), bool)
    return _find_refused(one_array(column), lambda part: part.cast(kind))


def find_broken(column: Column) -> np.ndarray:
    """Return bool[n]: which values are not of their own type: text that is not UTF-8, decimals with too many digits.

    Arrow lets such values be made, and refuses them where they are read from stored bytes.
    """
    try:
        for array in column.chunks if isinstance(column, pa.ChunkedArray) else (column,):
            if not _is_ascii(array):
                array.validate(full=True)
    except pa.ArrowInvalid:
        return _find_broken(one_array(column))
    return np.zeros(len(column), bool)


def _is_ascii(array: pa.Array) -> bool:
    """Whether the array is text of ASCII alone, which is found a dozen times as fast as that text is UTF-8.

    Raises:
        ArrowInvalid: its buffers are too short.
    """
    array.validate()
    if not pa.types.is_string(array.type) or not len(array):
        return False
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    if data is None or not (edges[1:] >= edges[:-1]).all():
        return False
    text = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
    return not len(text) or bool(text.max() < 128)


def _find_broken(array: pa.Array) -> np.ndarray:
    """Return bool[n], as `find_broken`: what is below a null does not count."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pc.fill_null(pa.array(_find_broken(array.dictionary)).take(array.indices), False).to_numpy(  # pyright: ignore[reportAttributeAccessIssue]
            zero_copy_only=False
        )
    if pa.types.is_struct(kind):
        return np.logical_or.reduce([_find_broken(child) for child in array.flatten()])
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(kind.field(0)))  # Arrow cannot flatten a map
    if pa.types.is_nested(kind):
        found = np.zeros(len(array), bool)
        found[pc.list_parent_indices(array).to_numpy()[_find_broken(array.flatten())]] = True  # pyright: ignore[reportAttributeAccessIssue]
        return found
    return _find_refused(array, lambda part: part.validate(full=True))


def _find_refused(array: pa.Array, convert: Callable[[pa.Array], object]) -> np.ndarray:
    """Return bool[n]: for which values Arrow refuses to do something; none, if it cannot do it at all."""
    found, left = np.zeros(len(array), bool), [(0, len(array))]
    while left:
        start, end = left.pop()
        try:
            convert(array[start:end])
        except pa.ArrowNotImplementedError:  # for no value of this type
            break
        except pa.ArrowInvalid:
            middle = (start + end) // 2
            if end - start == 1:
                found[start] = True
            else:
                left += [(start, middle), (middle, end)]
    return found


def fixed_values(array: pa.Array) -> np.ndarray:
    """Return the fixed-width values as in memory, arbitrary where null; decimal128 as uint64[n, 2], low word first."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    data = array.buffers()[1]
    if pa.types.is_decimal128(array.type):
        shape, kind = (-1, 2), np.dtype(np.uint64)
    elif pa.types.is_floating(array.type):
        shape, kind = -1, np.dtype(f"f{array.type.bit_width // 8}")
    else:
        sign = "u" if pa.types.is_unsigned_integer(array.type) else "i"
        shape, kind = -1, np.dtype(f"{sign}{array.type.bit_width // 8}")
    if data is None or not len(array):
        return np.empty(0, kind).reshape(shape)
    values = np.frombuffer(data, kind, count=data.size // kind.itemsize)
    if shape != -1:
        values = values[: len(values) // 2 * 2].reshape(shape)
    return values[array.offset : array.offset + len(array)]


def spans(array: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the bytes of a string or binary array are: (data: uint8[...], starts: int64[n], lengths:
    int64[n])."""
    _, offsets, data = array.buffers()
    if not len(array) or offsets is None:
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    edges = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    base, end = int(edges[0]), int(edges[-1])
    taken = np.frombuffer(data, np.uint8)[base:end] if data is not None and end > base else np.empty(0, np.uint8)
    return taken, edges[:-1] - base, edges[1:] - edges[:-1]


def row_bytes(rows: pa.Table | pa.RecordBatch) -> np.ndarray:
    """Return int64[n]: the bytes of strings and binary values of each row, with dictionaries decoded."""
    sizes = np.zeros(len(rows), np.int64)
    for column in rows.columns:
        indirect = pa.types.is_dictionary(column.type)
        kind = column.type.value_type if indirect else column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            lengths = pc.binary_length(column.dictionary if indirect else column)  # pyright: ignore[reportAttributeAccessIssue]
            lengths = lengths.take(column.indices) if indirect else lengths
            sizes += pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
    return sizes


def split_by_bytes(sizes: np.ndarray, limit: int) -> list[slice]:
    """Split rows of these sizes into slices of at most `limit` bytes, or one row.

    Arrow cannot gather 2 GiB or more of one string column, so rows of any size are gathered slice by slice.
    """
    ends = np.cumsum(sizes)
    slices, start = [], 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        slices.append(slice(start, end))
        start = end
    return slices


def take_from(tables: Sequence[pa.Table], rows: np.ndarray) -> pa.Table:
    """Take rows from several tables of one schema, numbered as if these were concatenated, in the order of `rows`; only
    the taken rows are copied."""
    if len(tables) == 1:
        return tables[0].take(pa.array(rows))
    starts = np.cumsum([0, *map(len, tables)])
    which = np.searchsorted(starts, rows, side="right") - 1
    order = stable_order(which)
    ordered, ends = rows[order], np.cumsum([0, *np.bincount(which, minlength=len(tables))])
    parts = zip(tables, starts[:-1], pairwise(ends), strict=True)
    taken = [table.take(pa.array(ordered[begin:end] - start)) for table, start, (begin, end) in parts if end > begin]
    if not taken:
        return tables[0].slice(0, 0)
    if len(taken) == 1:
        return taken[0]
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return pa.concat_tables(taken).combine_chunks().take(pa.array(back))


def canonical_bits(values: np.ndarray, *, fold_zeros: bool) -> np.ndarray:
    """Return the bits of floats as unsigned integers of their width, every NaN as Java's; -0.0 as 0.0 if
    `fold_zeros`."""
    wide = values.dtype.itemsize == 8
    bits = values.view(np.uint64 if wide else np.uint32)
    word = bits.dtype.type
    if fold_zeros:
        negative_zero = bits == word(1 << (63 if wide else 31))
        if negative_zero.any():
            bits = np.where(negative_zero, word(0), bits)
    nan = np.isnan(values)
    if nan.any():
        bits = np.where(nan, word(0x7FF8000000000000 if wide else 0x7FC00000), bits)
    return bits
