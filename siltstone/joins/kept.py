"""The state variable that keeps rows of an input of a join until they are due."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siltstone.rows import Keys
from siltstone.state.access import ListAccess, address, find_owners, positions, positions_of
from siltstone.state.backend import KeyedState
from siltstone.state.nested import nested_columns, stored_columns
from siltstone.state.time_index import DueRows
from siltstone.state.variables import CLOCKS, DueColumn, ListState, Purpose, check_not_null

MET = "met"
"""the column of state that tells whether a row has found a partner"""
ROWS_A_BATCH = 1 << 18
"""rows that are taken at once of those that are due"""


@dataclass
class Kept:
    """Kept rows of some keys.

    Attributes:
        keys: the keys.
        owner: int64[n], the ordinal in `keys` of each row's key.
        position: int64[n], where the rows are in the lists of their keys.
        rows: the rows, as the variable declares them.
    """

    keys: Keys
    owner: np.ndarray
    position: np.ndarray
    rows: pa.Table

    def take(self, which: np.ndarray) -> "Kept":
        """Return some of the rows, by ordinal (integers)."""
        return Kept(self.keys, self.owner[which], self.position[which], self.rows.take(pa.array(which)))


class KeptAccess(ListAccess):
    """The kept rows of one input, by key and in the order in which they came. Nothing is left of a key without rows."""

    def find(self, keys: Keys) -> Kept:
        """Return all kept rows of some keys."""
        owner, position, stored = self._read(keys, renews=False)
        return Kept(keys, owner, position, nested_columns(stored, self._table.schema.nested))

    def replace(self, kept: Kept) -> None:
        """Write rows in their old places."""
        schema = self._table.schema
        rows = stored_columns(kept.rows.select(schema.value.names), schema.nested)
        self._table.put(address(kept.keys, kept.owner, positions(kept.position)), rows)

    def remove(self, kept: Kept) -> None:
        """Delete rows."""
        self._table.delete(address(kept.keys, kept.owner, positions(kept.position)))
        owners, owner = np.unique(kept.owner, return_inverse=True)
        self.trim(kept.keys.take(owners), owner, kept.position)

    def show_due(self, due: DueRows) -> tuple[pa.Table, pa.Table]:
        """Return the operator keys of rows that are due, and the rows as the variable declares them."""
        schema = self._table.schema
        return due.keys.columns.select(schema.key.names), nested_columns(due.values, schema.nested)

    def find_owners(self, due: DueRows) -> tuple[Keys, np.ndarray]:
        """Return the distinct operator keys of rows that are due, and of each row the ordinal of its key."""
        return find_owners(self._table.schema.key, due.keys.columns, due.keys.key_groups)

    def drop(self, due: DueRows, owners: Keys, owner: np.ndarray) -> None:
        """Delete rows that are due, of these operator keys (`find_owners`)."""
        self._table.delete(due.keys)
        self.trim(owners, owner, positions_of(due.keys))


@dataclass(frozen=True)
class KeptRows(ListState):
    """Rows of one input, due `due_plus_us` after the time in the column `due`.

    Attributes:
        join: the kind of join, which decides what is kept.
    """

    due: str = ""
    due_plus_us: int = 0
    join: str = ""

    @property
    def drops_bounds(self) -> bool:
        return True

    def check_edit(self, puts: pa.Table) -> None:
        check_not_null(puts, self.due, "so they would never be due")

    def due_columns(self, name: str) -> dict[str, DueColumn]:
        return {name: DueColumn(CLOCKS[0], self.due, self.due_plus_us, Purpose.ROWS)}

    def layout(self) -> str:
        return f"{type(self).__name__} ({self.join})"

    def bind(self, name: str, state: KeyedState) -> KeptAccess:
        return KeptAccess(name, state.tables, drops_bounds=self.drops_bounds)
