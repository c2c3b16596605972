"""The columnar protocol of working state: tables of keys in, tables of rows out, many at once.

A subtask's working state is one directory, `SubtaskState`, with a `StateTable` for each incremental variable and one
bytes value per key group for each opaque variable. It moves from version to version in steps:

    state.begin(step)       record that version `step` is being written (a crash from here on is noticed)
    table.get/put/delete    read and change; before-images are kept
    state.commit()          the version is now `step`
    state.rollback()        undo the newest begun or committed step; the version is again the previous one
    state.release(step)     steps up to `step` are in a completed checkpoint: drop their before-images

Working state may vanish at any time: the changelog is the truth. A torn update is always noticed at `open`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.schema import TableSchema


@dataclass
class Keys:
    """n distinct keys, for reading or writing many keys of `state.<variable>` at once.

    Attributes:
        columns: the key columns, one row per key: `keys.columns["tailnum"]`.
        hashes: uint64[n], xxhash64 of the columns, seeded with 42 and chained from column to column as in Spark.
        key_groups: uint16[n], the key group of each key; it depends only on the operator's key columns.
        memo: used by the state backend, which keeps the result of a `get` there, so that a `put` of the same keys does
            not search again.
    """

    columns: pa.Table
    hashes: np.ndarray
    key_groups: np.ndarray
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, ordinals: np.ndarray) -> "Keys":
        """Return some of the keys, by ordinal (integers)."""
        return Keys(self.columns.take(pa.array(ordinals)), self.hashes[ordinals], self.key_groups[ordinals])

    def with_columns(self, columns: Mapping[str, Any]) -> pa.Table:
        """Return a table of the key columns and further ones (Arrow or NumPy arrays or lists, one value per key)."""
        table = self.columns
        for name, values in columns.items():
            table = table.append_column(name, values if isinstance(values, pa.ChunkedArray) else pa.array(values))
        return table

    def describe(self, which: np.ndarray) -> str:
        """Describe some keys (bool[n], not all false) for an error message: "plane N1, year 2013 and 2 more keys"."""
        chosen = np.flatnonzero(which)
        first = ", ".join(f"{name} {self.columns.column(name)[int(chosen[0])]}" for name in self.columns.column_names)
        return first if len(chosen) == 1 else f"{first} and {len(chosen) - 1} more keys"


@dataclass(frozen=True)
class Lookup:
    """The result of a `get`: `found` (bool[n]) and `values` (n rows of the value columns, all null if not found)."""

    found: np.ndarray
    values: pa.Table


@runtime_checkable
class StateTable(Protocol):
    """One table of one variable in one subtask. Not safe for use by two threads."""

    schema: TableSchema
    tracking_s: float
    """seconds that tracking changes has taken since the table was opened (part of Tlog of US 9471438)"""

    @property
    def rows(self) -> int:
        """The number of live rows."""
        ...

    @property
    def digests(self) -> np.ndarray:
        """uint64[max_parallelism]: per key group, the sum modulo 2**64 of the row digests of all live rows.

        Updated with each change from the old and the new row, never by scanning (a restore must reach the same digests:
        promise 1).
        """
        ...

    def reserve(self, rows: int) -> None:
        """Pre-allocate for `rows` rows in total."""
        ...

    def expect_changes(self, rows: int) -> None:
        """Prepare in the background for `rows` changes or more, which are on their way. Rows stay as they are."""
        ...

    def get(self, batch: Keys) -> Lookup:
        """Return the rows of many keys."""
        ...

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key; `values` has the value columns and as many rows as the batch."""
        ...

    def delete(self, batch: Keys) -> None:
        """Delete the rows of these keys; a missing row is no error."""
        ...

    def count_changed(self) -> np.ndarray:
        """Return int64[max_parallelism]: how many keys of each key group changed since the last `mark()`.

        Raises:
            StateError: see `changes`.
        """
        ...

    def changes(self, groups: KeyGroupRange | None = None) -> tuple[pa.Table, np.ndarray]:
        """Return every key changed since the last `mark()`, once, newest: (`schema.changes` table, uint16 key groups).

        Sorted by key group; with `groups` only theirs. A key inserted and deleted again since the mark may appear as a
        delete.

        Raises:
            StateError: tracking was off at some time since the last mark, so the changes are not known.
        """
        ...

    def mark(self) -> None:
        """Forget the changes, since a checkpoint that contains them is being taken."""
        ...

    def scan(self, groups: KeyGroupRange, *, in_order: bool = True) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield all live rows of `groups` in bounded batches: (`schema.rows` table, key groups).

        Args:
            in_order: by key group, then primary key; otherwise in the order that the backend reads fastest.
        """
        ...


@runtime_checkable
class KeyedState(Protocol):
    """Tables and opaque values of a range of key groups, in any backend."""

    @property
    def groups(self) -> KeyGroupRange:
        """The key groups of this state."""
        ...

    @property
    def max_parallelism(self) -> int:
        """The number of key groups of the stream."""
        ...

    @property
    def tables(self) -> Mapping[str, StateTable]:
        """Name -> table."""
        ...

    @property
    def opaque(self) -> Mapping[str, Mapping[int, bytes]]:
        """Variable -> key group -> bytes; change it with `set_opaque`, so that the change is part of the step."""
        ...

    def set_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        """Replace the bytes of some key groups of one opaque variable."""
        ...


class TableSnapshot(Protocol):
    """One table at a snapshot's version."""

    schema: TableSchema

    @property
    def rows(self) -> int:
        """The number of live rows."""
        ...

    @property
    def digests(self) -> np.ndarray:
        """uint64[max_parallelism], see `StateTable.digests`."""
        ...

    def scan(self, groups: KeyGroupRange) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield all live rows of `groups`, as `StateTable.scan` does; later steps do not change what comes.

        Raises:
            StateError: the snapshot is gone; what was yielded is void.
        """
        ...


class StateSnapshot(Protocol):
    """The state at one version. It stays while later steps change the state, and after the state is closed, until
    `release`, the end of the process that made it, or a rollback to an older version.
    """

    path: Path
    version: int
    groups: KeyGroupRange
    tables: Mapping[str, TableSnapshot]
    opaque: Mapping[str, Mapping[int, bytes]]

    def release(self) -> None:
        """Let the version go, or close it in a process that does not own it; idempotent."""
        ...


@runtime_checkable
class SubtaskState(KeyedState, Protocol):
    """All working state of one subtask; the module's docstring describes its steps."""

    directory: Path

    @property
    def version(self) -> int:
        """The newest committed step."""
        ...

    @property
    def changed_opaque(self) -> Mapping[str, Collection[int]]:
        """The opaque variables that the open step has set -> the key groups whose values it set."""
        ...

    def begin(self, step: int, *, tracking: bool | Collection[str]) -> None:
        """Begin to write version `step`; `tracking` says whether changes are noted from now on, or of which tables."""
        ...

    def commit(self) -> None:
        """Complete the step: it becomes `version`."""
        ...

    def rollback(self) -> None:
        """Undo the newest step, begun or committed; StateError if its before-images are gone."""
        ...

    def release(self, step: int) -> None:
        """Drop before-images of steps up to and including `step`."""
        ...

    def snapshot(self, version: int | None = None) -> StateSnapshot:
        """Return a snapshot of a version (the newest committed one by default), several at once if wanted.

        An older version can be had as long as the before-images of all later steps are kept (see
        `SubtaskState.release`). The time that this takes does not depend on the size of the state.

        Raises:
            StateError: the version is not kept: it was never written, or its before-images are gone.
        """
        ...

    def close(self) -> None:
        """Flush and close the directory; idempotent."""
        ...


TIME_INDEXES = "time"
"""the directory of the time indexes of a subtask's tables (`state.time_index`), in that of its state"""
LOCAL_SETS = "files"
"""the directory of the row files of a subtask's newest checkpoints, in that of its state"""


@runtime_checkable
class RowFilesState(SubtaskState, Protocol):
    """Working state whose rows lie in files that never change, so that a checkpoint may consist of them (`Form.FILES`,
    docs/adr/0058)."""

    def copy_rows(self, directory: Path) -> Mapping[str, tuple[int, int]]:
        """Copy the rows as they are now, those of an open step too, into a new directory: files by links.

        Returns:
            Table -> its rows, and an interval of change tracking after those that its rows are marked with.
        """
        ...

    def load_rows(self, name: str, batches: Iterable[tuple[pa.Table, np.ndarray]]) -> None:
        """Fill key groups of a table within the open step, before which it was empty, by files that are made here: much
        faster than putting rows.

        Args:
            batches: rows (`TableSchema.rows`) and their key groups, in order of key group and primary key.
        """
        ...

    def adopt_rows(
        self, source: Path, counts: Mapping[str, tuple[int, int]], digests: Mapping[str, np.ndarray]
    ) -> None:
        """Let empty state at version 0 have the rows that `copy_rows` wrote, by links.

        Args:
            source: a directory of the files.
            counts: what `copy_rows` returned.
            digests: table -> uint64[max_parallelism], which the rows are known to have.
        """
        ...


class Backend(Protocol):
    """Opens working state. `backends.named` returns the implementations by name."""

    def open(
        self,
        directory: Path,
        schemas: Mapping[str, TableSchema],
        opaque: tuple[str, ...],
        groups: KeyGroupRange,
        max_parallelism: int,
    ) -> SubtaskState:
        """Open the state in `directory`, or create it empty at version 0 if it is missing.

        The caller has exclusive use of the directory. An interrupted step is rolled back at open. State that cannot be
        trusted (damaged, half written, from before a restart of the machine, of another shape) raises StateError, and
        the caller deletes the directory and restores it from the changelog.
        """
        ...

    def open_snapshot(self, path: Path) -> StateSnapshot:
        """Open a snapshot (`StateSnapshot.path`) that another process of this machine holds.

        Raises:
            StateError: it is gone.
        """
        ...
