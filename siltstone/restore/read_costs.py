"""Add up what a restore of one checkpoint alone reads, while a proof walks through many."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from siltstone.model import Form, Handle, KeyGroupRange
from siltstone.restore.files import files_bytes


@dataclass(slots=True)
class _LiveRead:
    inside: slice
    bytes: int
    seconds: float


class ReadCosts:
    """The bytes of the blocks that a restore of the newest checkpoint reads, and the seconds that they took.

    A proof applies every block of a walk. A restore reads only each variable's newest base and the deltas after it, and
    a table may have a newer base than the others.
    """

    def __init__(self, key_groups: KeyGroupRange) -> None:
        self._groups = key_groups
        self._begins: dict[str, np.ndarray] = {}
        """variable -> per key group, the position of the base that its chain begins with"""
        self._live: dict[str, dict[int, _LiveRead]] = {}
        """variable -> position -> what a restore reads"""
        self._position = 0
        self.bytes = 0
        self.seconds = 0.0

    def add(self, handle: Handle, seconds: float = 0.0) -> None:
        """Go on to a block, given in the order in which blocks apply, that took some seconds to read and apply."""
        self._add(handle, handle.length, seconds, replaces=handle.form is Form.BASE)

    def add_files(self, handles: Sequence[Handle], seconds: float = 0.0) -> None:
        """Go on to the files of a checkpoint, if it has any: several tables share them, and each counts for a part."""
        sets: dict[KeyGroupRange, list[Handle]] = {}
        for handle in handles:
            if handle.form is Form.FILES:
                sets.setdefault(handle.key_groups, []).append(handle)
        for files in sets.values():
            tables = {handle.variable: handle for handle in files}
            part, rest = divmod(files_bytes(files), len(tables))
            for number, handle in enumerate(tables.values()):
                size = part + (rest if number == 0 else 0)
                self._add(handle, size, seconds / len(sets) / len(tables), replaces=True)

    def _add(self, handle: Handle, size: int, seconds: float, *, replaces: bool) -> None:
        self._position += 1
        begins = self._begins.setdefault(handle.variable, np.zeros(len(self._groups), np.int64))
        live = self._live.setdefault(handle.variable, {})
        inside = slice(handle.key_groups.start - self._groups.start, handle.key_groups.end - self._groups.start)
        if replaces:
            begins[inside] = self._position
            for position in [p for p, read in live.items() if begins[read.inside].min() > p]:
                self._remove(live.pop(position))
        live[self._position] = _LiveRead(inside, size, seconds)
        self.bytes += size
        self.seconds += seconds

    def keep(self, variables: Collection[str]) -> None:
        """Forget the variables that are not among these: a checkpoint no longer has them."""
        for gone in self._live.keys() - set(variables):
            del self._begins[gone]
            for read in self._live.pop(gone).values():
                self._remove(read)

    def _remove(self, read: _LiveRead) -> None:
        self.bytes -= read.bytes
        self.seconds -= read.seconds
