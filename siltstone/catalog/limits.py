"""What a database bounds: how many values one statement names, and how large an integer is."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value", int, str)
ID_END = 2**63
"""larger ids do not fit a database's integer column"""
_AT_ONCE = 500
"""how many values one statement names; databases bound its parameters"""


def in_batches(values: Iterable[Value]) -> Iterator[list[Value]]:
    """The values without repetition, ascending, as many at a time as one statement can name."""
    ordered = sorted(set(values))
    return (ordered[i : i + _AT_ONCE] for i in range(0, len(ordered), _AT_ONCE))
