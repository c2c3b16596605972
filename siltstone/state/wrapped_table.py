"""`WrappedTable`: a state table over another one, which does everything until a subclass does some of it otherwise."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys, Lookup, StateTable
from siltstone.state.schema import TableSchema


class WrappedTable:
    """Implements `StateTable` by the one that it wraps, `table`."""

    def __init__(self, table: StateTable) -> None:
        self.table: StateTable = table
        self.schema: TableSchema = table.schema

    @property
    def rows(self) -> int:
        """The number of live rows."""
        return self.table.rows

    @property
    def digests(self) -> np.ndarray:
        """See `StateTable.digests`."""
        return self.table.digests

    @property
    def tracking_s(self) -> float:
        """See `StateTable.tracking_s`."""
        return self.table.tracking_s

    @tracking_s.setter
    def tracking_s(self, seconds: float) -> None:
        self.table.tracking_s = seconds

    def reserve(self, rows: int) -> None:
        """Pre-allocate for `rows` rows in total."""
        self.table.reserve(rows)

    def expect_changes(self, rows: int) -> None:
        """Prepare in the background for `rows` changes or more."""
        self.table.expect_changes(rows)

    def get(self, batch: Keys) -> Lookup:
        """Return the rows of many keys."""
        return self.table.get(batch)

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key."""
        self.table.put(batch, values)

    def delete(self, batch: Keys) -> None:
        """Delete the rows of these keys; keys without a row are skipped."""
        self.table.delete(batch)

    def count_changed(self) -> np.ndarray:
        """See `StateTable.count_changed`."""
        return self.table.count_changed()

    def changes(self, groups: KeyGroupRange | None = None) -> tuple[pa.Table, np.ndarray]:
        """See `StateTable.changes`."""
        return self.table.changes(groups)

    def mark(self) -> None:
        """Forget the changes, since a checkpoint that contains them is being taken."""
        self.table.mark()

    def scan(self, groups: KeyGroupRange, *, in_order: bool = True) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """See `StateTable.scan`."""
        return self.table.scan(groups, in_order=in_order)
