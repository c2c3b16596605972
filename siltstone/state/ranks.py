"""Ranks: one number per row that orders rows by key group and key, if the key is a number with few enough bits."""

import numpy as np
import pyarrow as pa

from siltstone.state.columns import Column, fixed_values, null_mask, one_array
from siltstone.state.ordering import stable_order

KEY_BITS = 48
"""maximum bits of keys that have ranks; those above are the key group's"""


def is_integer_like(kind: pa.DataType) -> bool:
    """Whether values of the type are represented by integers."""
    return pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind)


def ranks(key_groups: np.ndarray, key: Column) -> np.ndarray | None:
    """Return uint64[n] that ascend by key group (uint16[n]) and then key, null last; None if the keys do not fit."""
    array = one_array(key)
    if not is_integer_like(array.type):
        return None
    values = fixed_values(array)
    absent = null_mask(array) if array.null_count else None
    if absent is not None:
        some = values[~absent]
        values = np.where(absent, some[:1] if len(some) else values.dtype.type(0), values)
    if not len(values):
        return np.zeros(0, np.uint64)
    signed = values.dtype.kind == "i"
    words = values.astype(np.int64).view(np.uint64) if signed else values.astype(np.uint64)
    # In unsigned arithmetic the difference to the least is right even if that is negative.
    words = words - np.array(values.min(), np.int64 if signed else np.uint64).view(np.uint64)
    last = int(words.max()) + (absent is not None)
    bits = last.bit_length()
    if bits > KEY_BITS:
        return None
    if absent is not None:
        words[absent] = last
    words |= key_groups.astype(np.uint64) << np.uint64(bits)
    return words


def first_of_each(rank: np.ndarray) -> np.ndarray:
    """Return the first row of each rank (int64[m]), ranks ascending."""
    order = stable_order(rank)
    in_order = rank[order]
    return order[np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1])))]
