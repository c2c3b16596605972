"""The changes that a changelog writer logs, the handles it returns, and reading them back.

Change, OpaqueChange     one variable's changes of many rows; a new value of an opaque variable
WholeTable               instead of changes: a whole table
ChangelogHandle          where the changes after a sequence number are
read_changes             reads and verifies the changes of a handle
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siltstone.format.block import Block, decode_block
from siltstone.format.opaque import decode_opaque
from siltstone.model import Handle, KeyGroupRange, Kind, StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import verify

VALUE = "value"
"""name of the column that `read_changes` yields for an opaque variable"""


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
    """The whole new value of an opaque variable: key group -> bytes. It replaces any earlier value."""

    variable: str
    values: Mapping[int, bytes]

    @property
    def size_bytes(self) -> int:
        """Approximate bytes it takes in a segment."""
        return sum(len(value) for value in self.values.values())

    @property
    def spread(self) -> KeyGroupRange:
        """The range of key groups for which it has a value."""
        return KeyGroupRange(min(self.values), max(self.values) + 1) if self.values else KeyGroupRange(0, 0)


@dataclass(frozen=True)
class ChangelogHandle:
    """The changes of one writer with sequence numbers `after < sqn <= to`.

    Its parts are uploads, which may have more changes than requested: those at or before `after` are left out, so that
    a restore does not apply them again.
    """

    key_groups: KeyGroupRange
    after: int
    to: int
    parts: tuple[tuple[Handle, ...], ...]
    stored: tuple[StoredObject, ...]

    @property
    def handles(self) -> list[Handle]:
        """The requested handles by sequence number; a part's index has the number of the part's last change."""
        wanted = [handle for part in self.parts for handle in part if self.after < handle.sqn <= self.to]
        return sorted(wanted, key=lambda handle: handle.sqn)

    @property
    def objects(self) -> list[StoredObject]:
        """The objects that the handles refer to, by name; they may have other writers' changes, too."""
        named = {handle.object for handle in self.handles}
        return [stored for stored in self.stored if stored.name in named]


def read_changes(
    store: Store, handle: ChangelogHandle, key_groups: KeyGroupRange | None = None
) -> Iterator[tuple[int, str, pa.Table, np.ndarray]]:
    """Read the changes of a handle in order, of all key groups or of `key_groups`.

    Yields:
        (sqn, variable, changes, key groups as uint16[rows]). An opaque variable's value is a table with one binary
        column, `value`, and one row per key group.

    Raises:
        CorruptObject: an object is missing, cut or altered; the message names it.
        Unreachable: the store does not answer.
    """
    for part in handle.handles:
        if part.kind is Kind.INDEX:
            continue
        name = f"{part.variable} of {part.operator} in object {part.object}"
        data = store.read_range(part.object, part.offset, part.length)
        verify(data, part.checksum, name)
        if part.kind is Kind.OPAQUE:
            values = decode_opaque(data, name)
            table = pa.table({VALUE: pa.array(values.values(), pa.binary())})
            groups = np.array(list(values), dtype=np.uint16)
        else:
            table, groups = decode_block(data, name, part.rows)
        if key_groups is not None:
            first, last = np.searchsorted(groups, [key_groups.start, key_groups.end])
            table, groups = table.slice(first, last - first), groups[first:last]
        yield part.sqn, part.variable, table, groups
