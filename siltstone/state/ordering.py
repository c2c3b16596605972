"""The order of rows by integers, stable.

NumPy sorts an array of 64-bit words by vector instructions, but neither a stable `argsort` nor `lexsort` uses them. So
here columns are packed into words with the number of the row in the lowest bits, which makes the order stable. Half a
million rows take a fifth of the time of `argsort`, and an eighth of a `lexsort` by two columns. Columns that do not fit
one word are sorted by in several passes, the last bits first.
"""

import numpy as np

_WORD_BITS = 64
_FEW_ROWS = 1 << 10
"""with at most this many rows, `np.lexsort` takes no longer"""
_RADIX_BYTES = 2
"""numbers of at most this width NumPy sorts stably by radix, which is faster still"""


def stable_order(*columns: np.ndarray) -> np.ndarray:
    """Return the rows (int64[n]) ascending by the first column, then by the next, and so on; equal ones as they were.

    Args:
        columns: integers or bool of any width, n each.

    Raises:
        TypeError: a column has other numbers.
    """
    rows = len(columns[0])
    if any(column.dtype.kind not in "iub" for column in columns):
        raise TypeError("rows are put in order by integers")
    if rows <= _FEW_ROWS:
        return np.lexsort(columns[::-1])
    if len(columns) == 1 and columns[0].dtype.itemsize <= _RADIX_BYTES:
        return np.argsort(columns[0], kind="stable")
    row_bits = (rows - 1).bit_length()
    room = _WORD_BITS - row_bits
    if len(columns) == 1 and (order := _by_high_bits(*_code(columns[0]), row_bits)) is not None:
        return order
    order = None
    word, used = np.zeros(rows, np.uint64), 0
    for column in reversed(columns):
        code, bits = _code(column)
        while bits:
            if used == room:
                order = _pass(order, word, row_bits)
                word, used = np.zeros(rows, np.uint64), 0
            taken = min(bits, room - used)
            part = code if taken == bits else code & np.uint64((1 << taken) - 1)
            word |= part << np.uint64(used) if used else part
            bits, used = bits - taken, used + taken
            if bits:
                code >>= np.uint64(taken)
    return _pass(order, word, row_bits)


def _by_high_bits(code: np.ndarray, bits: int, row_bits: int) -> np.ndarray | None:
    """Return the order by as many bits as fit a word; None if others matter as well, which is rare for hashes."""
    left_out = bits + row_bits - _WORD_BITS
    if left_out <= 0:
        return _pass(None, code, row_bits)
    order = _pass(None, code >> np.uint64(left_out), row_bits)
    in_order = code[order]
    return order if (in_order[1:] >= in_order[:-1]).all() else None


def _code(column: np.ndarray) -> tuple[np.ndarray, int]:
    """Return how far each number is above the least one (uint64[n]), and the bits of the largest of these."""
    signed = column.dtype.kind == "i"
    # In unsigned arithmetic the difference to the least is right even if that is negative.
    kind = np.int64 if signed else np.uint64
    code = column.astype(kind, copy=False).view(np.uint64) - kind(column.min()).view(np.uint64)
    return code, int(code.max()).bit_length()


def _pass(order: np.ndarray | None, word: np.ndarray, row_bits: int) -> np.ndarray:
    """Sort rows that are in some order by a word of each row, which has room for the place in that order."""
    if order is not None:
        word = word[order]
    word <<= np.uint64(row_bits)
    word |= np.arange(len(word), dtype=np.uint64)
    word.sort()
    word &= np.uint64((1 << row_bits) - 1)
    place = word.view(np.int64)
    return place if order is None else order[place]
