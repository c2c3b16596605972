"""HyperLogLog sketches as bytes: how many distinct values there were, from the greatest rank of each register.

A value's hash names one of m = 2**p registers by its lowest p bits. Its rank is one more than the number of zeros at
the end of the other bits. A register has the greatest rank of its values, 0 without any (P. Flajolet, E. Fusy, O.
Gandouet, F. Meunier, "HyperLogLog: the analysis of a near-optimal cardinality estimation algorithm", 2007).

The bytes are a function of the registers, so equal sets of values have equal bytes:

    sparse    a uint32 (little-endian) per register that is not 0: register << 8 | rank, ascending; below m bytes
    dense     a byte per register, m in all, once the sparse form would be no smaller
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.state.columns import null_mask, spans
from siltstone.state.ordering import stable_order

PRECISIONS = range(4, 17)
"""p: fewer registers estimate nothing, and more take more than 64 KiB"""
BYTES_MAX = (1 << 31) - 1
"""of the sketches in one array: Arrow's offsets are int32"""
_WORD = np.dtype("<u4")
_CHUNK_BYTES = 16 << 20
_ALPHA = 0.5 / np.log(2)


def make_sketches(hashes: np.ndarray, absent: np.ndarray, precision: int) -> pa.Array:
    """Return the sketch of each value alone (binary[n]) from its hash (uint64[n]); an empty one where `absent`."""
    hashes = hashes[~absent]
    rest = hashes >> np.uint64(precision)
    last = rest & (~rest + np.uint64(1))  # 2**zeros, which float64 has exactly
    rank = np.where(rest == 0, 65 - precision, np.frexp(last.astype(np.float64))[1])
    words = (hashes & np.uint64((1 << precision) - 1)).astype(_WORD) << _WORD.type(8) | rank.astype(_WORD)
    return _to_array(words, 4 * (~absent).astype(np.int64))


def merge_sketches(array: pa.Array, group: np.ndarray, size: int, precision: int, what: str) -> pa.Array:
    """Return the sketch of all values of each group (binary[size]).

    Args:
        array: binary[n], null for no value.
        group: int64[n], below `size`.
        what: how error messages begin.

    Raises:
        UsageError: the sketches take 2 GiB or more, or some are not of this precision.
    """
    words, starts, lengths = _read_words(array, precision, what)
    registers = 1 << precision
    dense = lengths == registers // 4
    entries = words if not dense.any() else words[np.repeat(~dense, lengths)]
    if len(entries) and entries.max() >> 8 >= registers:
        raise _not_sketch_error(precision, what)
    entries, owner = _greatest(entries, np.repeat(group, np.where(dense, 0, lengths)))
    sizes = np.bincount(owner, minlength=size)
    is_dense = 4 * sizes >= registers
    is_dense[group[dense]] = True
    sizes = np.where(is_dense, registers // 4, sizes)
    if 4 * sizes.sum() > BYTES_MAX:
        raise UsageError(
            f"{what}: its sketches of {int(is_dense.sum()):,} keys take 2 GiB or more in one call",
            advice="use a lower precision, or smaller micro-batches",
        )
    made, ends = np.empty(int(sizes.sum()), _WORD), np.cumsum(sizes)
    sparse = ~is_dense[owner]
    made[np.repeat(~is_dense, sizes)] = entries[sparse]
    rows = np.flatnonzero(dense)
    rows = rows[stable_order(group[rows])]
    entries, owner = entries[~sparse], owner[~sparse]
    for groups in _chunks(np.flatnonzero(is_dense), registers):
        merged = np.zeros((len(groups), registers), np.uint8)
        first, last = np.searchsorted(owner, [groups[0], groups[-1] + 1])
        part = entries[first:last]
        merged[np.searchsorted(groups, owner[first:last]), part >> _WORD.type(8)] = part & _WORD.type(255)
        first, last = np.searchsorted(group[rows], [groups[0], groups[-1] + 1])
        for some in _chunks(rows[first:last], registers):
            of = group[some]
            begins = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
            greatest = np.maximum.reduceat(_take_dense(words, starts[some], registers), begins, axis=0)
            at = np.searchsorted(groups, of[begins])
            merged[at] = np.maximum(merged[at], greatest)
        places = np.lib.stride_tricks.sliding_window_view(made, registers // 4, writeable=True)
        places[ends[groups] - registers // 4] = merged.view(_WORD)
    return _to_array(made, 4 * sizes)


def estimate(array: pa.Array, precision: int, what: str) -> np.ndarray:
    """Estimate the number of distinct values of each sketch (int64[n]); 0 for null.

    It is the improved raw estimator (algorithm 6) of O. Ertl, "New cardinality estimation algorithms for HyperLogLog
    sketches", 2017, which needs no tables and has no bias at any size.

    Raises:
        UsageError: some are not of this precision.
    """
    words, starts, lengths = _read_words(array, precision, what)
    registers, ranks = 1 << precision, 66 - precision
    found = np.zeros(len(lengths))
    dense = lengths == registers // 4
    for rows in _chunks(np.flatnonzero(dense), registers):
        every = _take_dense(words, starts[rows], registers).astype(np.int64)
        if every.max() >= ranks:
            raise _not_sketch_error(precision, what)
        every += np.arange(len(rows))[:, None] * ranks
        found[rows] = _estimate(np.bincount(every.reshape(-1), minlength=len(rows) * ranks).reshape(-1, ranks))
    for rows in _chunks(np.flatnonzero(~dense), ranks * 8):
        sizes = lengths[rows]
        places = np.arange(sizes.sum()) + np.repeat(starts[rows] - (np.cumsum(sizes) - sizes), sizes)
        rank = (words[places] & _WORD.type(255)).astype(np.int64)
        if len(rank) and rank.max() >= ranks:
            raise _not_sketch_error(precision, what)
        rank += np.repeat(np.arange(len(rows)), sizes) * ranks
        counts = np.bincount(rank, minlength=len(rows) * ranks).reshape(-1, ranks)
        counts[:, 0] = registers - sizes
        found[rows] = _estimate(counts)
    return np.rint(found).astype(np.int64)


def _estimate(counts: np.ndarray) -> np.ndarray:
    """Estimate from how many registers have each rank (int64[n, ranks])."""
    registers = counts.sum(axis=1).astype(np.float64)
    total = registers * _tau(1 - counts[:, -1] / registers)
    for rank in range(counts.shape[1] - 2, 0, -1):
        total = 0.5 * (total + counts[:, rank])
    with np.errstate(divide="ignore"):  # infinitely many zeros: no value
        total = total + registers * _sigma(counts[:, 0] / registers)
        return _ALPHA * registers * registers / total


def _sigma(x: np.ndarray) -> np.ndarray:
    """Return x + the sum of x**(2**k) * 2**(k - 1) over k >= 1; infinity for 1."""
    empty = x == 1
    x = np.where(empty, 0, x)
    total, weight, before = x, 1.0, np.full(len(x), -1.0)
    while (total != before).any():
        x, before = x * x, total
        total = total + x * weight
        weight *= 2
    return np.where(empty, np.inf, total)


def _tau(x: np.ndarray) -> np.ndarray:
    """Return a third of 1 - x - the sum of (1 - x**(2**-k))**2 * 2**-k over k >= 1; 0 for 0."""
    none = x == 0
    x = np.where(none, 1, x)
    total, weight, before = 1 - x, 1.0, np.full(len(x), -1.0)
    while (total != before).any():
        x, before = np.sqrt(x), total
        weight *= 0.5
        total = total - (1 - x) ** 2 * weight
    return total / 3


def _read_words(array: pa.Array, precision: int, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the uint32 of all sketches, and of each where its own begin and how many it has (int64[n]).

    Raises:
        UsageError: a length is none of this precision.
    """
    data, starts, lengths = spans(array)
    if array.null_count:
        lengths = np.where(null_mask(array), 0, lengths)
    if len(lengths) and ((lengths % 4).any() or lengths.max() > 1 << precision):
        raise _not_sketch_error(precision, what)
    return data[: len(data) // 4 * 4].view(_WORD), starts // 4, lengths // 4


def _not_sketch_error(precision: int, what: str) -> UsageError:
    return UsageError(f"{what}: its state has bytes that are not a sketch of precision {precision}")


def _greatest(entries: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the entry of each owner and register with the greatest rank, and its owner, sorted by both."""
    order = np.sort(owner.astype(np.uint64) << np.uint64(32) | entries)
    if len(order):
        register = order >> np.uint64(8)
        order = order[np.r_[register[1:] != register[:-1], True]]
    return order.astype(_WORD), (order >> np.uint64(32)).astype(np.int64)


def _take_dense(words: np.ndarray, starts: np.ndarray, registers: int) -> np.ndarray:
    """Return the registers of dense sketches (uint8[n, registers])."""
    return np.lib.stride_tricks.sliding_window_view(words, registers // 4)[starts].view(np.uint8)


def _chunks(rows: np.ndarray, bytes_each: int) -> Iterator[np.ndarray]:
    """Split rows so that those of a part take bounded memory."""
    step = max(1, _CHUNK_BYTES // bytes_each)
    yield from (rows[at : at + step] for at in range(0, len(rows), step))


def _to_array(words: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Make an array of sketches of these lengths in bytes."""
    ends = np.concatenate(([0], np.cumsum(lengths)))
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(words)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)
