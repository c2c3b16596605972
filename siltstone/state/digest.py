"""Digests of state: 64 bits per row, summed per key group, so that each change updates them (a restore must reach the
recorded digests: promise 1).

The complete function follows. All arithmetic is on unsigned 64-bit integers, modulo 2**64; `>>` shifts in zeros.

    mix(x, m)     x ^= x >> 32;  x *= m;  x ^= x >> 29;  x *= 0x9E3779B97F4A7C15;  x ^= x >> 32
    row digest    mix(sum over the columns that are not null of mix(word + s, m), 0xBF58476D1CE4E5B9)
                  with s = xxh3_64(name, seed 0) and m = xxh3_64(name, seed 1) | 1 of the UTF-8 name of the
                  column; the sum is 1 if all columns are null, so that a null key alone is not nothing

The word of a value:

    bool, integers, date32, timestamp[us]    the value (days, microseconds since 1970 UTC), sign-extended to
                                             64 bits
    float32, float64                         the IEEE 754 bits as float64; every NaN as 0x7FF8000000000000
    decimal128                               low + mix(high - sign, 0x94D049BB133111EB), where low and high
                                             are the two words of the unscaled value and sign is low as a
                                             signed number >> 63; so only low if the unscaled value fits
                                             64 bits, since mix(0, m) = 0
    string, binary                           XXH64 of the bytes with seed s

The digest of a table's key group is the sum of the digests of its rows; putting a row adds the new row's
digest and subtracts the old one's. An opaque value's digest is xxh3_64 of its bytes. A checkpoint's is
xxh3_128 over, in the order of the UTF-8 names: for each operator its name and its number of variables, for
each variable its name, its number of key groups and their digests; names as length (uint32) and UTF-8 bytes,
counts as uint32, digests as uint64, little-endian.

Digests do not depend on the order of rows and columns, nor on store, backend, parallelism or chain. Null
contributes nothing, so an added nullable column changes no digest. Equal integers of different widths have
equal digests, and so have equal floats, and equal decimals of one scale: a value column may become wider
(docs/adr/0067-value-columns-may-widen.md). Types are compared by schema, not by digest. -0.0 differs from 0.0
(keys are normalised before they are stored).

For a fixed column, mix is a bijection of the word, so two rows that differ in one fixed-width column never
collide before the last sum. Otherwise the digest behaves like a random function: two different states of a key
group have equal digests with probability 2**-64 (5.4e-20), and n comparisons of different states miss a
difference with probability at most n * 2**-64. Digests detect faults, not attacks by someone who can choose the
state. The test vectors in the tests prevent changes of the function, on which recorded digests depend.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import pyarrow as pa
import xxhash

from siltstone.model import KeyGroupRange
from siltstone.state.columns import canonical_bits, fixed_values, is_micros, null_mask, one_array, spans
from siltstone.state.hashing import BLOCK, hash_bytes

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_ROW = np.uint64(0xBF58476D1CE4E5B9)
_HIGH = np.uint64(0x94D049BB133111EB)


def row_digests(table: pa.Table) -> np.ndarray:
    """Return uint64[n]: the digest of each row over all columns of the table (only key, subkey and value columns).

    Raises:
        TypeError: a column's type is not one of state tables.
    """
    result = np.zeros(table.num_rows, np.uint64)
    with np.errstate(over="ignore"):
        columns = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            array = one_array(column)
            live = ~null_mask(array) if array.null_count else None
            columns.append((*_constants(name), _words(array, name), live))
        lives = [live for *_, live in columns if live is not None]
        blank = ~np.logical_or.reduce(lives) if lives and len(lives) == len(columns) else None
        for at in range(0, table.num_rows, BLOCK):
            block = slice(at, at + BLOCK)
            total = result[block]
            for shift, multiplier, words, live in columns:
                mixed = _mix(_to_unsigned(words[block]) + shift, multiplier)
                if live is not None:
                    mixed *= live[block]
                total += mixed
            if blank is not None:
                total[blank[block]] = 1
            _mix(total, _ROW)
    return result


def group_sums(digests: np.ndarray, key_groups: np.ndarray, max_parallelism: int) -> np.ndarray:
    """Return uint64[max_parallelism]: per key group the sum of its rows' digests, modulo 2**64."""
    sums = np.zeros(max_parallelism, np.uint64)
    np.add.at(sums, key_groups, digests)
    return sums


def opaque_digest(value: bytes) -> int:
    """Return the 64-bit digest of one opaque value."""
    return xxhash.xxh3_64_intdigest(value)


def assemble_digests(
    parts: Iterable[tuple[str, KeyGroupRange, Mapping[str, np.ndarray]]], max_parallelism: int
) -> dict[str, dict[str, np.ndarray]]:
    """Assemble operator -> table or opaque variable -> uint64[max_parallelism] from parts of the key groups.

    Args:
        parts: operator, key groups, and variable -> uint64[n] of these n key groups. Key groups in no part get 0.
    """
    whole: dict[str, dict[str, np.ndarray]] = {}
    for operator, groups, digests in parts:
        variables = whole.setdefault(operator, {})
        for name, own in digests.items():
            variables.setdefault(name, np.zeros(max_parallelism, np.uint64))[groups.start : groups.end] = own
    return whole


def checkpoint_digest(digests: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Return a checkpoint's digest (32 hex digits) from `{operator: {variable: uint64[max_parallelism]}}`; operators
    without variables do not count."""
    total = xxhash.xxh3_128()
    for operator in sorted((name for name, variables in digests.items() if variables), key=str.encode):
        variables = digests[operator]
        total.update(_name(operator) + _count(len(variables)))
        for variable in sorted(variables, key=str.encode):
            groups = np.ascontiguousarray(variables[variable], "<u8")
            total.update(_name(variable) + _count(len(groups)) + groups.tobytes())
    return total.hexdigest()


def _name(text: str) -> bytes:
    encoded = text.encode()
    return _count(len(encoded)) + encoded


def _count(number: int) -> bytes:
    return number.to_bytes(4, "little")


@lru_cache(maxsize=4096)
def _constants(name: str) -> tuple[np.uint64, np.uint64]:
    shift = xxhash.xxh3_64_intdigest(name.encode(), seed=0)
    return np.uint64(shift), np.uint64(xxhash.xxh3_64_intdigest(name.encode(), seed=1) | 1)


def _mix(x: np.ndarray, multiplier: np.uint64) -> np.ndarray:
    """Apply `mix` of the module's docstring, in place."""
    x ^= x >> np.uint64(32)
    x *= multiplier
    x ^= x >> np.uint64(29)
    x *= _MULTIPLIER
    x ^= x >> np.uint64(32)
    return x


def _to_unsigned(words: np.ndarray) -> np.ndarray:
    """Convert words to uint64; narrower signed integers are sign-extended."""
    return words.view(np.uint64) if words.dtype.itemsize == 8 else words.astype(np.uint64)


def _words(array: pa.Array, name: str) -> np.ndarray:
    """Return one integer per row, of any width; arbitrary where null."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        data, starts, lengths = spans(array)
        return hash_bytes(data, starts, lengths, np.full(len(array), _constants(name)[0]))
    if pa.types.is_decimal128(kind):
        both = fixed_values(array)
        low, high = both[:, 0].copy(), both[:, 1].copy()
        high -= (low.view(np.int64) >> np.int64(63)).view(np.uint64)
        return low + _mix(high, _HIGH)
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return canonical_bits(fixed_values(array.cast(pa.float64())), fold_zeros=False)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date32(kind) or is_micros(kind):
        return fixed_values(array)
    raise TypeError(f"cannot digest a column of type {kind}")
