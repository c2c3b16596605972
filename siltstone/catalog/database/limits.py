"""Limits of databases: the number of values in a statement, and the size of an integer."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value", int, str)
ID_END = 2**63
"""ids from here on do not fit a database's integer column"""
_AT_ONCE = 500
"""maximum values in one statement; databases limit its parameters"""


def in_batches(values: Iterable[Value]) -> Iterator[list[Value]]:
    """Yield the distinct values, ascending, in batches that fit one statement."""
    ordered = sorted(set(values))
    return (ordered[i : i + _AT_ONCE] for i in range(0, len(ordered), _AT_ONCE))
