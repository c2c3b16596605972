"""The memory of Arrow columns as NumPy sees it: values, spans of bytes, nulls, the bits of floats."""

from typing import TypeAlias

import numpy as np
import pyarrow as pa

Column: TypeAlias = pa.Array | pa.ChunkedArray


def one_array(column: Column) -> pa.Array:
    """The column as one contiguous array, dictionaries decoded, wide-offset strings narrowed."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_large_string(array.type):
        array = array.cast(pa.string())
    elif pa.types.is_large_binary(array.type):
        array = array.cast(pa.binary())
    return array


def is_micros(kind: pa.DataType) -> bool:
    """Whether the type is a timestamp in microseconds, the only kind that Spark and state tables hold."""
    return pa.types.is_timestamp(kind) and kind.unit == "us"


def null_mask(array: pa.Array) -> np.ndarray:
    """bool[n]: where the array is null."""
    return array.is_null().to_numpy(zero_copy_only=False)


def fixed_values(array: pa.Array) -> np.ndarray:
    """The fixed-width values as they lie in memory, arbitrary where null; decimal128 as uint64[n, 2], low
    word first."""
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
    """Where the bytes of a string or binary array lie: (data: uint8[...], starts: int64[n], lengths:
    int64[n])."""
    _, offsets, data = array.buffers()
    if not len(array) or offsets is None:
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    edges = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    base, end = int(edges[0]), int(edges[-1])
    taken = np.frombuffer(data, np.uint8)[base:end] if data is not None and end > base else np.empty(0, np.uint8)
    return taken, edges[:-1] - base, edges[1:] - edges[:-1]


def canonical_bits(values: np.ndarray, *, fold_zeros: bool) -> np.ndarray:
    """The bits of floats as unsigned integers of their width, every NaN as Java's; -0.0 as 0.0 if
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
