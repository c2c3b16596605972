"""Compare a restored checkpoint with its full snapshot, row by row.

A snapshot is a copy of the working state, made without the changelog (`run.snapshot`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.format.base import read_base, read_snapshot_values
from siltstone.model import KeyGroupRange, StoredObject
from siltstone.restore.export import UnitTask, rebuild
from siltstone.restore.restore import opaque_digests
from siltstone.state.backend import StateTable
from siltstone.state.columns import one_array, row_bytes, split_by_bytes, take_from
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.ordering import stable_order
from siltstone.state.schema import OPAQUE_SCHEMA, TableSchema
from siltstone.store.base import Store
from siltstone.store.paths import snapshot_of
from siltstone.store.ranged import read_verified

KEYS_NAMED = 5
"""how many differing keys a comparison lists"""
COMPARED_BYTES = 256 << 20
"""maximum bytes compared at once, on both sides together, unless one row has more"""


@dataclass(frozen=True)
class CompareTask:
    """One unit of a checkpoint, to be rebuilt and compared row by row with the snapshot's objects."""

    unit: UnitTask
    snapshot: Mapping[str, list[StoredObject]]
    """table -> its objects in the snapshot"""


@dataclass(frozen=True)
class TableComparison:
    """One table, or opaque variable, of one unit: n key groups, and what differs in each.

    Attributes:
        key_groups: uint16[n], ascending.
        restored_rows, live_rows: int64[n]; for an opaque variable, 1 if the key group has bytes.
        restored_digests, live_digests: uint64[n], the digests of these rows.
        only_restored, only_live, unequal: int64[n], how many keys only one side has, and how many have unequal values.
        columns: value column -> how many keys have unequal values in it.
        examples: some of the keys that differ.
    """

    operator: str
    table: str
    key_groups: np.ndarray
    restored_rows: np.ndarray
    live_rows: np.ndarray
    restored_digests: np.ndarray
    live_digests: np.ndarray
    only_restored: np.ndarray
    only_live: np.ndarray
    unequal: np.ndarray
    columns: Mapping[str, int]
    examples: Sequence[tuple[object, ...]]

    @property
    def differing(self) -> int:
        """How many keys differ."""
        return int((self.only_restored + self.only_live + self.unequal).sum())

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differing and bool((self.restored_digests == self.live_digests).all())

    def __str__(self) -> str:
        return f"{self.operator}.{self.table}: {self.differing} keys differ, such as {list(self.examples)}"


@dataclass(frozen=True)
class Difference:
    """Where two tables differ: row positions in the left and right table, and how many keys differ per column."""

    only_left: np.ndarray
    only_right: np.ndarray
    unequal: np.ndarray
    """positions in the left table"""
    columns: Mapping[str, int]


def compare_tasks(units: Sequence[UnitTask], objects: Sequence[StoredObject]) -> list[CompareTask]:
    """Pair each unit of a checkpoint with the objects of its snapshot that hold its operator's tables."""
    tasks = []
    for unit in units:
        by_table: dict[str, list[StoredObject]] = {}
        for stored in objects:
            operator, table = snapshot_of(stored.name)
            if operator == unit.unit.operator:
                by_table.setdefault(table, []).append(stored)
        tasks.append(CompareTask(unit, by_table))
    return tasks


def compare(store: Store, task: CompareTask, scratch: Path | None = None) -> list[TableComparison]:
    """Compare the restored and the live rows of every table and opaque variable of one unit.

    Args:
        scratch: see `BlockReader`.

    Raises:
        CorruptObject, ProofFailed: the chain or the snapshot is damaged.
    """
    target = rebuild(store, task.unit, scratch)
    operator, groups = task.unit.unit.operator, target.groups
    found = []
    for name, table in target.tables.items():
        live = [
            part
            for stored in task.snapshot.get(name, [])
            for part in read_base(read_verified(store, stored), table.schema, groups, name=stored.name)
        ]
        found.append(_compare_table(operator, name, table, groups, live))
    for name, values in target.opaque.items():
        live_values: dict[int, bytes] = {}
        for stored in task.snapshot.get(name, []):
            found_values = read_snapshot_values(store.read(stored), OPAQUE_SCHEMA, name=stored.name)
            live_values.update({g: v for g, v in found_values.items() if g in groups})
        found.append(_compare_opaque(operator, name, groups, values, live_values))
    return found


def differences(schema: TableSchema, left: pa.Table, right: pa.Table) -> Difference:
    """Find the rows that differ between two tables, or are only in one of them.

    Rows are aligned by the digest of the primary key; then every column is compared, floats bit by bit.
    """
    keys = schema.primary_key.names
    (left_hashes, left_order), (right_hashes, right_order) = (_by_hash(rows.select(keys)) for rows in (left, right))
    in_right, in_left = np.isin(left_hashes, right_hashes), np.isin(right_hashes, left_hashes)
    both_left, both_right = left_order[in_right], right_order[in_left]
    columns: dict[str, int] = {}
    differs = np.zeros(len(both_left), bool)
    if len(both_left) != len(both_right):
        # One of the tables has a primary key twice.
        differs = np.ones(len(both_left), bool)
    else:
        sizes = row_bytes(left)[both_left] + row_bytes(right)[both_right]
        lefts, rights = _batches(left), _batches(right)
        for part in split_by_bytes(sizes, COMPARED_BYTES):
            sides = take_from(lefts, both_left[part]), take_from(rights, both_right[part])
            for name in schema.rows.names:
                unequal = _find_unequal(*(one_array(side.column(name)) for side in sides))
                if unequal.any():
                    columns[name] = columns.get(name, 0) + int(unequal.sum())
                differs[part] |= unequal
    return Difference(left_order[~in_right], right_order[~in_left], both_left[differs], columns)


def _batches(table: pa.Table) -> list[pa.Table]:
    """Split a table into its batches in memory, at least one; each column of a batch is contiguous."""
    return [pa.Table.from_batches([batch]) for batch in table.to_batches()] or [table]


def _by_hash(keys: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return (the keys' digests, ascending; the positions of these keys). The hashes of keys that differ in which of
    their columns are null may be equal, their digests not."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *map(row_digests, _batches(keys))])
    order = stable_order(hashes)
    return hashes[order], order


def _find_unequal(left: pa.Array, right: pa.Array) -> np.ndarray:
    if pa.types.is_floating(left.type):
        bits = pa.int32() if left.type.bit_width == 32 else pa.int64()
        left, right = left.view(bits), right.view(bits)
    one_null = pc.xor(left.is_null(), right.is_null())
    unequal = pc.fill_null(pc.not_equal(left, right), False)
    return pc.or_(one_null, unequal).to_numpy(zero_copy_only=False)


def _compare_table(
    operator: str, name: str, table: StateTable, groups: KeyGroupRange, live: Iterable[tuple[pa.Table, np.ndarray]]
) -> TableComparison:
    restored, restored_groups = _concatenate(table.scan(groups), table.schema)
    copied, copied_groups = _concatenate(live, table.schema)
    found = differences(table.schema, restored, copied)
    start, n = groups.start, len(groups)
    keys = restored.select(table.schema.primary_key.names)
    differing = [
        take_from(_batches(keys), np.concatenate([found.unequal, found.only_left])[:KEYS_NAMED]),
        take_from(_batches(copied.select(keys.column_names)), found.only_right[:KEYS_NAMED]),
    ]

    def count(owners: np.ndarray) -> np.ndarray:
        return np.bincount(owners.astype(np.int64) - start, minlength=n)

    def digests(rows: pa.Table, owners: np.ndarray) -> np.ndarray:
        found = np.concatenate([np.zeros(0, np.uint64), *map(row_digests, _batches(rows))])
        return group_sums(found, owners, groups.end)[start:]

    return TableComparison(
        operator=operator,
        table=name,
        key_groups=np.arange(start, groups.end, dtype=np.uint16),
        restored_rows=count(restored_groups),
        live_rows=count(copied_groups),
        restored_digests=digests(restored, restored_groups),
        live_digests=digests(copied, copied_groups),
        only_restored=count(restored_groups[found.only_left]),
        only_live=count(copied_groups[found.only_right]),
        unequal=count(restored_groups[found.unequal]),
        columns=found.columns,
        examples=[tuple(row.values()) for row in pa.concat_tables(differing).slice(0, KEYS_NAMED).to_pylist()],
    )


def _compare_opaque(
    operator: str, name: str, groups: KeyGroupRange, restored: Mapping[int, bytes], live: Mapping[int, bytes]
) -> TableComparison:
    owners = range(groups.start, groups.end)

    def flags(is_so: Callable[[int], bool]) -> np.ndarray:
        return np.array([is_so(group) for group in owners], np.int64)

    unequal = flags(lambda g: g in restored and g in live and restored[g] != live[g])
    only_restored, only_live = (
        flags(lambda g: g in restored.keys() - live),
        flags(lambda g: g in live.keys() - restored),
    )
    differing = np.flatnonzero(unequal + only_restored + only_live) + groups.start
    return TableComparison(
        operator=operator,
        table=name,
        key_groups=np.arange(groups.start, groups.end, dtype=np.uint16),
        restored_rows=flags(restored.__contains__),
        live_rows=flags(live.__contains__),
        restored_digests=opaque_digests(restored, groups),
        live_digests=opaque_digests(live, groups),
        only_restored=only_restored,
        only_live=only_live,
        unequal=unequal,
        columns={"value": int(unequal.sum())} if unequal.any() else {},
        examples=[(int(group),) for group in differing[:KEYS_NAMED]],
    )


def _concatenate(parts: Iterable[tuple[pa.Table, np.ndarray]], schema: TableSchema) -> tuple[pa.Table, np.ndarray]:
    read = list(parts)
    if not read:
        return schema.rows.empty_table(), np.zeros(0, np.uint16)
    return pa.concat_tables([rows for rows, _ in read]), np.concatenate([owners for _, owners in read])
