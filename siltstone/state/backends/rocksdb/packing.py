"""Columns of bytes: many byte strings side by side in one Arrow array, joined from parts and split into them.

A part is either fixed (uint8[n, width]) or variable (large binary without nulls). What is split may be crafted: lengths
are checked before anything is read by them.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import UsageError

Packed: TypeAlias = pa.Array
"""a large-binary array"""
Part: TypeAlias = np.ndarray | pa.Array

_NONE = pa.scalar(b"", pa.large_binary())
_SORTED_BYTES = 16


def from_matrix(matrix: np.ndarray) -> Packed:
    """Return the rows of a uint8[n, width] array as byte strings, without copying them if they are contiguous."""
    count, width = matrix.shape
    offsets = np.arange(count + 1, dtype=np.int64) * width
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(matrix).reshape(-1))]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def from_list(strings: Sequence[bytes | None]) -> Packed:
    """Return byte strings as one array; None is null."""
    return pa.array(strings, pa.large_binary())


def to_list(packed: Packed) -> list[bytes]:
    """Return the byte strings, which must not be null, as a list."""
    return packed.to_numpy(zero_copy_only=False).tolist()


def edges(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Return (data: uint8[...], edges: int64[n + 1]): string i is `data[edges[i]:edges[i + 1]]`."""
    _, offsets, data = packed.buffers()
    if offsets is None or not len(packed):
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    found = np.frombuffer(offsets, np.int64)[packed.offset : packed.offset + len(packed) + 1]
    return np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8), found


def lengths(packed: Packed) -> np.ndarray:
    """Return int64[n]: the length of each string."""
    return np.diff(edges(packed)[1])


def join(parts: Iterable[Part]) -> Packed:
    """Join the parts of each row, in their order; at least one part."""
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, np.ndarray) and isinstance(joined[-1], np.ndarray):
            joined[-1] = np.concatenate([joined[-1], part], axis=1)
        else:
            joined.append(part)
    arrays = [from_matrix(part) if isinstance(part, np.ndarray) else part for part in joined]
    return arrays[0] if len(arrays) == 1 else pc.binary_join_element_wise(*arrays, _NONE)  # pyright: ignore[reportAttributeAccessIssue]


def head(packed: Packed, width: int) -> np.ndarray:
    """Return uint8[n, width]: the first bytes of each string.

    Raises:
        ValueError: one is shorter.
    """
    data, found = edges(packed)
    sizes = np.diff(found)
    if len(sizes) and sizes.min() < width:
        raise ValueError(f"{sizes.min()} bytes are where at least {width} belong")
    if np.all(sizes == width):
        return data[found[0] : found[-1]].reshape(-1, width)
    return data[found[:-1, None] + np.arange(width)]


def take(packed: Packed, rows: np.ndarray) -> Packed:
    """Return some of the strings, by ordinal; none is null."""
    data, found = edges(packed)
    if len(packed) and np.all((sizes := np.diff(found)) == sizes[0]):
        return from_matrix(np.take(data[found[0] : found[-1]].reshape(len(packed), -1), rows, axis=0))
    return packed.take(pa.array(rows))


def split(packed: Packed, sizes: Sequence[int | np.ndarray]) -> list[Part]:
    """Undo `join`: `sizes` has the width of each fixed part, and int64[n] for each variable one.

    Raises:
        ValueError: the parts do not make up the whole strings.
    """
    data, found = edges(packed)
    count = len(packed)
    widths = [size for size in sizes if isinstance(size, int)]
    variable = [size for size in sizes if not isinstance(size, int)]
    if any(len(size) and size.min() < 0 for size in variable) or np.any(sum(variable, sum(widths)) != np.diff(found)):
        raise ValueError("lengths do not add up")
    if not variable:
        ends = np.cumsum([0, *widths])
        matrix = data[found[0] : found[-1]].reshape(count, int(ends[-1]))
        return [matrix[:, start:end] for start, end in pairwise(ends)]
    starts = np.empty((count, len(sizes)), np.int64)
    at = found[:-1]
    for i, size in enumerate(sizes):
        starts[:, i] = at
        at = at + size
    offsets = pa.py_buffer(np.append(starts.reshape(-1), found[-1]))
    each = pa.Array.from_buffers(pa.large_binary(), count * len(sizes), [None, offsets, pa.py_buffer(data)])
    parts: list[Part] = []
    for i, size in enumerate(sizes):
        part = each.take(pa.array(np.arange(i, count * len(sizes), len(sizes))))
        parts.append(head(part, size) if isinstance(size, int) else part)
    return parts


def to_variable(packed: Packed, kind: pa.DataType, valid: np.ndarray | None) -> pa.Array:
    """Return byte strings as a string or binary array, null where `valid` (bool[n]) is False.

    Raises:
        UsageError: their total is 2 GiB or more.
    """
    try:
        _, offsets, data = packed.cast(pa.binary()).buffers()
    except pa.ArrowInvalid as error:
        raise UsageError(f"the values of {len(packed)} keys in one column exceed 2 GiB: use smaller batches") from error
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(packed), [bitmap, offsets, data])


def from_variable(array: pa.Array) -> Packed:
    """Return a string or binary array as byte strings, nulls as empty ones."""
    plain = array.cast(pa.binary()).cast(pa.large_binary())
    return plain.fill_null(b"") if plain.null_count else plain


def sort_by_start(packed: Packed, skip: int) -> np.ndarray:
    """Return int64[n]: the order of the strings by their first 8 bytes that differ among the 16 after `skip`.

    RocksDB reads and writes keys in order in half the time; exact order is not needed for that.
    """
    data, found = edges(packed)
    if len(packed) < 2:
        return np.arange(len(packed))
    sizes = np.diff(found) - skip
    if np.all(sizes == sizes[0]):
        start = data[found[0] : found[-1]].reshape(len(packed), -1)[:, skip : skip + _SORTED_BYTES]
    else:
        there = np.arange(_SORTED_BYTES) < sizes[:, None]
        at = found[:-1, None] + np.arange(skip, skip + _SORTED_BYTES)
        start = np.where(there, data[np.where(there, at, 0)], np.uint8(0))
    differing = np.flatnonzero((start != start[0]).any(axis=0))[:8]
    words = np.zeros((len(packed), 8), np.uint8)
    words[:, : len(differing)] = start[:, differing]
    return np.argsort(words.view(">u8").astype(np.uint64).reshape(-1))
