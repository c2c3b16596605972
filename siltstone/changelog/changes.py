"""The changes that a changelog writer logs.

Change, OpaqueChange     one variable's changes of many rows; a new value of an opaque variable
WholeTable               instead of changes: a whole table
"""

from collections.abc import Mapping
from dataclasses import dataclass

from siltstone.format.block import Block
from siltstone.model import KeyGroupRange, StoredObject


@dataclass(frozen=True, eq=False)
class Change:
    """Changes of one table of an incremental variable, as an encoded block.

    They build on entry `previous_entry` of the index of `previous_checkpoint`. `digest` is the sum modulo 2**64 of the
    table's digests after them, over the writer's key groups.
    """

    variable: str
    block: Block
    previous_checkpoint: int
    previous_entry: int
    digest: int

    @property
    def size_bytes(self) -> int:
        """Bytes it takes in a segment, without the index."""
        return len(self.block.data)

    @property
    def spread(self) -> KeyGroupRange:
        """The range of key groups that it changes."""
        first = self.block.first_key_group
        return KeyGroupRange(first, first + len(self.block.key_group_offsets) - 1)


@dataclass(frozen=True, eq=False)
class WholeTable:
    """A table in base form that is already stored, as the object `stored`; the log only refers to it.

    It builds on no checkpoint. `digest` is defined as in `Change`.
    """

    variable: str
    stored: StoredObject
    rows: int
    digest: int

    @property
    def size_bytes(self) -> int:
        """Bytes it takes in a segment, without the index."""
        return 0

    @property
    def spread(self) -> KeyGroupRange:
        """An empty range: the rows are in the object, not in the log."""
        return KeyGroupRange(0, 0)


@dataclass(frozen=True, eq=False)
class OpaqueChange:
    """New values of an opaque variable: key group -> bytes.

    They build on the version of `previous_checkpoint`; those of 0 replace any earlier value of the writer's key groups.
    """

    variable: str
    values: Mapping[int, bytes]
    previous_checkpoint: int = 0

    @property
    def size_bytes(self) -> int:
        """Approximate bytes it takes in a segment."""
        return sum(len(value) for value in self.values.values())

    @property
    def spread(self) -> KeyGroupRange:
        """The range of key groups for which it has a value."""
        return KeyGroupRange(min(self.values), max(self.values) + 1) if self.values else KeyGroupRange(0, 0)
