"""Spark's `xxhash64`, recomputed over Arrow columns in NumPy; key groups and distinct keys, which use it.

The result equals Spark's expression `xxhash64(...)` bit for bit: the seed is 42, the hash of a column is the
seed of the next one, and a null does not change the seed. A type is hashed as the Spark type that represents
it:

    bool, int8..int32, uint8, uint16, date32    one int
    int64, uint32, timestamp                    one long
    float32, float64                            the bits as int or long; -0.0 as 0.0, any NaN as the one of
                                                Java
    decimal128, precision <= 18                 the unscaled value as long
    decimal128, larger; uint64                  the bytes of `BigInteger.toByteArray` (Spark holds uint64 as
                                                decimal(20, 0))
    string, binary                              the bytes

Fixed-width columns are hashed in blocks that fit the processor's cache, variable-length ones in rounds over
the rows that still have bytes left. XXH64 is by Y. Collet; its constants are the five primes below.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash

from siltstone.state.columns import (
    Column,
    canonical_bits,
    fixed_values,
    is_micros,
    null_mask,
    one_array,
    spans,
)
from siltstone.state.ordering import stable_order

SEED = 42
BLOCK = 8192
"""rows processed at once: a few arrays of them fit the second-level cache"""
LONG_VALUE_BYTES = 4096
"""from this length on, one call of the C library per value costs less than the rounds"""
MAX_LONG_DIGITS = 18

P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)


def xxhash64(columns: Sequence[Column], seed: int | np.ndarray = SEED) -> np.ndarray:
    """Return uint64[n]: Spark's `xxhash64` of the rows of these columns, all of length n.

    `seed` may be uint64[n], such as the hash of earlier columns: hashing key columns and then subkey columns equals
    hashing them together.

    Raises:
        TypeError: a column's type is not one of state tables.
    """
    if not columns:
        raise TypeError("xxhash64 needs at least one column")
    n = len(columns[0])
    hashes = np.array(np.broadcast_to(np.asarray(seed, np.uint64), n))
    with np.errstate(over="ignore"):
        for column in columns:
            array = one_array(column)
            hashed = _hash_column(array, hashes)
            hashes = np.where(null_mask(array), hashes, hashed) if array.null_count else hashed
    return hashes


def key_groups(hashes: np.ndarray, max_parallelism: int) -> np.ndarray:
    """Return uint16[n]: `pmod` of each hash, as a signed 64-bit number, by `max_parallelism`."""
    signed = hashes.view(np.int64)
    if max_parallelism & (max_parallelism - 1) == 0:
        return (signed & np.int64(max_parallelism - 1)).astype(np.uint16)
    return np.mod(signed, np.int64(max_parallelism)).astype(np.uint16)


def normalise_keys(table: pa.Table) -> pa.Table:
    """Replace -0.0 by 0.0 and every NaN by the canonical one, so that equal keys have equal bits."""
    for i, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(i, field, _normalize_floats(one_array(table.column(i))))
    return table


def find_distinct(hashes: np.ndarray, columns: Sequence[Column]) -> tuple[np.ndarray, np.ndarray]:
    """Find the distinct keys of rows: (first: int64[m], group: int64[n]).

    `first[k]` is the first row with key k, `group[i]` the ordinal of row i's key; ordinals ascend by hash, whatever
    the order of the rows (except for keys that collide). `hashes` (uint64[n]) is any function of the key; the keys
    themselves are compared, so a collision only costs time. Null equals null.
    """
    first, group = _by_code(hashes)
    representative = first[group]
    repeated = np.flatnonzero(representative != np.arange(len(group)))
    if not len(repeated) or _equal_rows(columns, repeated, representative[repeated]):
        return first, group
    codes = np.zeros(len(hashes), np.uint64)
    for column in columns:
        encoded = _to_comparable(one_array(column)).dictionary_encode(null_encoding="encode")
        # Both factors are below n, so that their combination is exact as long as n < 2**32.
        pairs = codes * np.uint64(len(codes)) + encoded.indices.to_numpy().astype(np.uint64)
        codes = _by_code(pairs)[1].astype(np.uint64)
    return _by_code(codes)


def first_rows(hashes: np.ndarray, columns: Sequence[Column]) -> np.ndarray:
    """Return the `first` of `find_distinct`, at half its cost."""
    order = stable_order(hashes)
    in_order = hashes[order]
    again = in_order[1:] == in_order[:-1]
    if again.any():
        repeated = np.flatnonzero(again)
        if not _equal_rows(columns, order[repeated], order[repeated + 1]):
            return find_distinct(hashes, columns)[0]
        order = order[np.r_[True, ~again]]
    return order


def hash_bytes(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return uint64[n]: XXH64 of the n byte ranges of `data` (uint8), each with its own seed."""
    result = np.empty(len(starts), np.uint64)
    long = np.flatnonzero(lengths >= LONG_VALUE_BYTES)
    for i in long.tolist():
        value = data[starts[i] : starts[i] + lengths[i]]
        result[i] = xxhash.xxh64_intdigest(value.tobytes(), int(seeds[i]))
    short = np.arange(len(starts)) if not len(long) else np.flatnonzero(lengths < LONG_VALUE_BYTES)
    padded = np.empty(len(data) + 8, np.uint8)
    padded[: len(data)] = data
    padded[len(data) :] = 0
    with np.errstate(over="ignore"):
        for at in range(0, len(short), BLOCK):
            rows = short[at : at + BLOCK]
            result[rows] = _hash_block(padded, starts[rows], lengths[rows], seeds[rows])
    return result


def _hash_column(array: pa.Array, seeds: np.ndarray) -> np.ndarray:
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return hash_bytes(*spans(array), seeds)
    if pa.types.is_decimal128(kind) and kind.precision > MAX_LONG_DIGITS:
        return _hash_big_integers(fixed_values(array), seeds)
    if pa.types.is_uint64(kind):
        low = fixed_values(array)
        return _hash_big_integers(np.stack([low, np.zeros_like(low)], axis=1), seeds)
    if pa.types.is_decimal128(kind):
        return _in_blocks(_hash_long, fixed_values(array)[:, 0], seeds)
    if pa.types.is_floating(kind) and kind.bit_width >= 32:
        values = canonical_bits(fixed_values(array), fold_zeros=True)
        return _in_blocks(_hash_int if kind.bit_width == 32 else _hash_long, values, seeds)
    if is_micros(kind) or pa.types.is_int64(kind) or pa.types.is_uint32(kind):
        return _in_blocks(_hash_long, fixed_values(array), seeds)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date32(kind):
        return _in_blocks(_hash_int, fixed_values(array), seeds)
    raise TypeError(f"cannot hash a column of type {kind}")


def _in_blocks(function, values: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    result = np.empty(len(values), np.uint64)
    for at in range(0, len(values), BLOCK):
        block = slice(at, at + BLOCK)
        result[block] = function(values[block], seeds[block])
    return result


def _rotate(x: np.ndarray, bits: int) -> np.ndarray:
    high = x << np.uint64(bits)
    x >>= np.uint64(64 - bits)
    x |= high
    return x


def _avalanche(h: np.ndarray) -> np.ndarray:
    h ^= h >> np.uint64(33)
    h *= P2
    h ^= h >> np.uint64(29)
    h *= P3
    h ^= h >> np.uint64(32)
    return h


def _hash_int(values: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    h = seeds + (P5 + np.uint64(4))
    # Sign-extended to 32 bits, then unsigned, like Java's `input & 0xFFFFFFFFL`.
    h ^= values.astype(np.int32).view(np.uint32).astype(np.uint64) * P1
    h = _rotate(h, 23)
    h *= P2
    h += P3
    return _avalanche(h)


def _hash_long(values: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    h = seeds + (P5 + np.uint64(8))
    return _avalanche(_mix_word(h, values.astype(np.uint64)))


def _mix_word(h: np.ndarray, word: np.ndarray) -> np.ndarray:
    word *= P2
    word = _rotate(word, 31)
    word *= P1
    h ^= word
    h = _rotate(h, 27)
    h *= P1
    h += P4
    return h


def _hash_block(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Compute XXH64 of byte ranges, one round at a time; 8 bytes after each range must be readable."""
    words = np.ndarray(len(data) - 7, "<u8", buffer=data, strides=(1,))
    halves = np.ndarray(len(data) - 3, "<u4", buffer=data, strides=(1,))
    h = seeds + P5
    wide = np.flatnonzero(lengths >= 32)
    if len(wide):
        h[wide] = _hash_stripes(words, starts[wide], lengths[wide], seeds[wide])
    h += lengths.astype(np.uint64)
    position, rest = starts + (lengths & -32), lengths & 31
    for k in range(3):
        rows = np.flatnonzero(rest >= 8 * (k + 1))
        if not len(rows):
            break
        h[rows] = _mix_word(h[rows], words[position[rows] + 8 * k])
    position, rest = position + (rest & -8), rest & 7
    rows = np.flatnonzero(rest >= 4)
    if len(rows):
        h[rows] = _rotate(h[rows] ^ (halves[position[rows]].astype(np.uint64) * P1), 23) * P2 + P3
    position, rest = position + (rest & 4), rest & 3
    for k in range(3):
        rows = np.flatnonzero(rest > k)
        if not len(rows):
            break
        h[rows] = _rotate(h[rows] ^ (data[position[rows] + k].astype(np.uint64) * P5), 11) * P1
    return _avalanche(h)


def _hash_stripes(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    lanes = [seeds + (P1 + P2), seeds + P2, seeds.copy(), seeds - P1]
    stripes = lengths // 32
    for k in range(int(stripes.max())):
        rows = np.flatnonzero(stripes > k)
        position = starts[rows] + 32 * k
        for j, lane in enumerate(lanes):
            lane[rows] = _rotate(lane[rows] + words[position + 8 * j] * P2, 31) * P1
    h = np.zeros(len(starts), np.uint64)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        h += _rotate(lane.copy(), bits)
    for lane in lanes:
        h ^= _rotate(lane * P2, 31) * P1
        h *= P1
        h += P4
    return h


def _hash_big_integers(words: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Hash 128-bit integers (uint64[n, 2], low word first) as Java's shortest big-endian two's complement bytes."""
    data = np.ascontiguousarray(np.ascontiguousarray(words).view(np.uint8)[:, ::-1])
    magnitude = np.where(data[:, :1] >= 128, ~data, data)
    used = magnitude != 0
    leading = np.where(used.any(axis=1), used.argmax(axis=1), 16)
    top = magnitude[np.arange(len(data)), np.minimum(leading, 15)]
    # One more byte if the sign would not fit; zero and minus one take one byte.
    lengths = np.maximum(16 - leading + (top >= 128), 1).astype(np.int64)
    starts = np.arange(len(data), dtype=np.int64) * 16 + 16 - lengths
    return hash_bytes(data.reshape(-1), starts, lengths, seeds)


def _normalize_floats(array: pa.Array) -> pa.Array:
    bits = canonical_bits(fixed_values(array), fold_zeros=True)
    mask = null_mask(array) if array.null_count else None
    return pa.array(bits.view(f"f{bits.dtype.itemsize}"), type=array.type, mask=mask)


def _by_code(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find distinct numbers like `find_distinct`, with ordinals ascending by number; vectorised sorting is much faster
    than hashing."""
    group = np.empty(len(codes), np.int64)
    if not len(codes):
        return group, group.copy()
    order = stable_order(codes)
    in_order = codes[order]
    new = np.concatenate(([True], in_order[1:] != in_order[:-1]))
    group[order] = np.cumsum(new) - 1
    return order[new], group


def _to_comparable(array: pa.Array) -> pa.Array:
    """Return floats as normalised bits, because a NaN key equals itself; other types unchanged."""
    if pa.types.is_floating(array.type):
        mask = null_mask(array) if array.null_count else None
        return pa.array(canonical_bits(fixed_values(array), fold_zeros=True), mask=mask)
    return array


def _equal_rows(columns: Sequence[Column], left: np.ndarray, right: np.ndarray) -> bool:
    a, b = pa.array(left), pa.array(right)
    arrays = (_to_comparable(one_array(column)) for column in columns)
    return all(array.take(a).equals(array.take(b)) for array in arrays)
