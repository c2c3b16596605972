"""Rows put in the order of key group and key by one number each, where a key is one number that leaves room for it."""

import numpy as np
import pyarrow as pa

from siltstone.state.columns import Column, fixed_values, one_array

KEY_BITS = 48
"""keys that span no more bits have ranks; the 16 above them hold the key group"""

_FEW_RUNS = 16


def is_integer_like(kind: pa.DataType) -> bool:
    """Whether values of the type are integers in all but name."""
    return pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind)


def ranks(key_groups: np.ndarray, key: Column) -> np.ndarray | None:
    """uint64[n] that ascend by key group (uint16[n]) and then key, equal where both are; None where there are none."""
    array = one_array(key)
    if not is_integer_like(array.type) or array.null_count:
        return None
    values = fixed_values(array)
    if not len(values):
        return np.zeros(0, np.uint64)
    signed = values.dtype.kind == "i"
    words = values.astype(np.int64).view(np.uint64) if signed else values.astype(np.uint64)
    # In the arithmetic of words the difference to the least is right even where that is negative.
    words = words - np.array(values.min(), np.int64 if signed else np.uint64).view(np.uint64)
    if int(words.max()).bit_length() > KEY_BITS:
        return None
    words |= key_groups.astype(np.uint64) << np.uint64(KEY_BITS)
    return words


def first_of_each(rank: np.ndarray) -> np.ndarray:
    """The first row of each rank (int64[m]), ranks ascending."""
    # The stable sort merges runs that are in order, which pays where there are few; else the other is twice as fast.
    stable = np.count_nonzero(rank[1:] < rank[:-1]) < _FEW_RUNS
    order = np.argsort(rank, kind="stable" if stable else None)
    in_order = rank[order]
    begins = np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1])))
    return order[begins] if stable or len(begins) == len(order) else np.minimum.reduceat(order, begins)
