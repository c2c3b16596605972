"""The columnar protocol behind which working state lives: tables of keys in, tables of rows out, many at once.

A subtask's working state is one directory of its own, `SubtaskState`, holding a `StateTable` for each incremental
variable and one bytes value per key group for each opaque variable. It moves from version to version in steps:

    state.begin(step)       remember that version `step` is being written (a crash from here on is noticed)
    table.get/put/delete    reads and changes; before-images are kept
    state.commit()          version is now `step`
    state.rollback()        undo the newest begun or committed step; version is again what it was before
    state.release(step)     steps up to `step` are in a completed checkpoint: drop their before-images

Working state may vanish at any time: the changelog is the truth. A torn update is always noticed at `open`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.schema import TableSchema


@dataclass
class Keys:
    """Distinct keys, n of them: what `state.<variable>` takes to read or write many keys at once.

    Attributes:
        columns: the key columns, one row per key: `keys.columns["tailnum"]`.
        hashes: uint64[n], xxhash64 of the columns, seeded with 42 and chained from column to column as Spark does.
        key_groups: uint16[n], the key group of each key; it depends on the operator's key columns alone.
        memo: belongs to the state backend, which keeps there what a `get` found, so that a `put` of the same keys
            does not search again.
    """

    columns: pa.Table
    hashes: np.ndarray
    key_groups: np.ndarray
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, ordinals: np.ndarray) -> "Keys":
        """Some of the keys, by ordinal (integers)."""
        return Keys(self.columns.take(pa.array(ordinals)), self.hashes[ordinals], self.key_groups[ordinals])

    def with_columns(self, columns: Mapping[str, Any]) -> pa.Table:
        """The key columns followed by further ones (Arrow or NumPy arrays or lists, one value per key), as a table."""
        table = self.columns
        for name, values in columns.items():
            table = table.append_column(name, values if isinstance(values, pa.ChunkedArray) else pa.array(values))
        return table

    def describe(self, which: np.ndarray) -> str:
        """A phrase for an error message that names the first of some keys (bool[n], not all false): "plane N1, year
        2013 and 2 more keys"."""
        chosen = np.flatnonzero(which)
        first = ", ".join(f"{name} {self.columns.column(name)[int(chosen[0])]}" for name in self.columns.column_names)
        return first if len(chosen) == 1 else f"{first} and {len(chosen) - 1} more keys"


@dataclass(frozen=True)
class Lookup:
    """What `get` found: `found` (bool[n]) and `values` (n rows of the value columns, all null where not found)."""

    found: np.ndarray
    values: pa.Table


@runtime_checkable
class StateTable(Protocol):
    """One table of one variable in one subtask. Not safe for use by two threads."""

    schema: TableSchema

    @property
    def rows(self) -> int:
        """How many live rows there are."""
        ...

    @property
    def digests(self) -> np.ndarray:
        """uint64[max_parallelism]: per key group, the sum modulo 2**64 of the row digests of all live rows.

        Kept change by change from the old and the new row (promise 1), never by scanning.
        """
        ...

    def reserve(self, rows: int) -> None:
        """So many rows in all are to come: what would be made anew as they come may be made once."""
        ...

    def get(self, batch: Keys) -> Lookup:
        """The rows of many keys."""
        ...

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key; `values` has the value columns and as many rows as the batch."""
        ...

    def delete(self, batch: Keys) -> None:
        """Remove the rows of these keys; absent keys are no error."""
        ...

    def changed(self) -> np.ndarray:
        """int64[max_parallelism]: how many keys of each key group changed since the last `mark()`.

        Raises:
            StateError: as `changes`.
        """
        ...

    def changes(self, groups: KeyGroupRange | None = None) -> tuple[pa.Table, np.ndarray]:
        """Every key changed since the last `mark()`, once, newest: (`schema.changes` table, uint16 key groups).

        Sorted by key group; with `groups` only theirs. A key inserted and deleted again since the mark may appear as a
        delete.

        Raises:
            StateError: tracking has been off at some time since the last mark, so the changes are not known.
        """
        ...

    def mark(self) -> None:
        """Forget the changes: a checkpoint that holds them is being taken."""
        ...

    def scan(self, groups: KeyGroupRange) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """All live rows of `groups`, in bounded batches ordered by key group: (`schema.rows` table, key groups)."""
        ...


@runtime_checkable
class KeyedState(Protocol):
    """Tables and opaque values of a range of key groups, wherever they are kept."""

    @property
    def groups(self) -> KeyGroupRange:
        """The key groups it holds."""
        ...

    @property
    def max_parallelism(self) -> int:
        """How many key groups the stream has in all."""
        ...

    @property
    def tables(self) -> Mapping[str, StateTable]:
        """Name -> table."""
        ...

    @property
    def opaque(self) -> Mapping[str, Mapping[int, bytes]]:
        """Variable -> key group -> bytes; assign with `set_opaque`, so that the change is part of the step."""
        ...

    def set_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        """Replace the bytes of some key groups of one opaque variable."""
        ...


@runtime_checkable
class SubtaskState(KeyedState, Protocol):
    """All working state of one subtask; see the module's docstring for its life."""

    @property
    def version(self) -> int:
        """The newest committed step."""
        ...

    def begin(self, step: int, *, tracking: bool) -> None:
        """Start writing version `step`; `tracking` says whether changes are logged from now on."""
        ...

    def commit(self) -> None:
        """The step is whole: `version` becomes it."""
        ...

    def rollback(self) -> None:
        """Undo the newest step, begun or committed; StateError if its before-images are gone."""
        ...

    def release(self, step: int) -> None:
        """Drop before-images of steps up to and including `step`."""
        ...

    def close(self) -> None:
        """Flush and let go of the directory; idempotent."""
        ...


class Backend(Protocol):
    """Opens working state. One implementation per technique; chosen by name in `backends.named`."""

    def open(
        self,
        directory: Path,
        schemas: Mapping[str, TableSchema],
        opaque: tuple[str, ...],
        groups: KeyGroupRange,
        max_parallelism: int,
    ) -> SubtaskState:
        """Open the state in `directory`, or create it empty at version 0 where there is none.

        The caller has exclusive use of the directory. A torn begun step is rolled back at open; state that cannot
        be trusted (damaged, half written, of a machine that has since restarted, of another shape) raises
        StateError, and the caller deletes the directory and restores it from the changelog.
        """
        ...
