"""Full snapshots: the live state, row by row as the stream has it, kept to compare a restore against.

A snapshot is read from the working state itself and not from the changelog, so it is an independent witness.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from siltstone.catalog.manifest import Manifest
from siltstone.changelog.base import read_base, write_base
from siltstone.errors import StateError
from siltstone.lifecycle.export import UnitTask, opaque_rows, rebuild
from siltstone.lifecycle.restore import opaque_of, schemas_of
from siltstone.lifecycle.working_state import LOCK_WAIT_S, locked
from siltstone.model import KeyGroupRange, StoredObject
from siltstone.state.backends import backend
from siltstone.state.columns import one_array
from siltstone.state.hashing import xxhash64
from siltstone.state.schema import TableSchema
from siltstone.store.base import Store
from siltstone.store.open import Warehouse
from siltstone.store.paths import CheckpointPath, snapshot_of

KEYS_NAMED = 5
"""how many differing keys a message names"""


@dataclass(frozen=True)
class SnapshotTask:
    """One subtask whose live state is to be written."""

    warehouse: Warehouse
    manifest: Manifest
    operator: str
    subtask: int
    groups: KeyGroupRange
    backend: str
    attempt: str


@dataclass(frozen=True)
class SnapshotPart:
    """What one subtask wrote."""

    objects: list[StoredObject]
    rows: int


def snapshot_tasks(warehouse: Warehouse, manifest: Manifest, backend_name: str, attempt: str) -> list[SnapshotTask]:
    """A task a subtask of the run that wrote the manifest."""
    tasks = []
    for operator in sorted(manifest.operators):
        parts = KeyGroupRange(0, manifest.max_parallelism).split(manifest.statistics["parallelism"])
        tasks += [
            SnapshotTask(warehouse, manifest, operator, subtask, groups, backend_name, attempt)
            for subtask, groups in enumerate(parts)
        ]
    return tasks


def take_snapshot(task: SnapshotTask) -> SnapshotPart:
    """Write the live tables of one subtask, a Parquet object each.

    Raises:
        StateError: this machine has no working state at exactly that checkpoint.
    """
    manifest, name = task.manifest, task.operator
    directory = task.warehouse.local.state(manifest.stream, manifest.epoch, name, task.subtask)
    with _locked(directory):
        if not directory.exists():
            raise _elsewhere(task)
        state = backend(task.backend).open(
            directory, schemas_of(manifest, name), opaque_of(manifest, name), task.groups, manifest.max_parallelism
        )
        try:
            if state.version != manifest.step:
                raise _elsewhere(task)
            objects, rows = [], 0
            names = CheckpointPath(manifest.stream, manifest.epoch, manifest.checkpoint)
            for table_name, table in state.tables.items():
                path = names.snapshot(name, table_name, task.subtask, task.attempt)
                with task.warehouse.store.create(path) as writer:
                    rows += write_base(writer, table.schema, table.scan(task.groups))
                assert writer.stored is not None
                objects.append(writer.stored)
            for variable, values in state.opaque.items():
                path = names.snapshot(name, variable, task.subtask, task.attempt)
                out = pa.BufferOutputStream()
                pq.write_table(opaque_rows(values), out)
                objects.append(task.warehouse.store.put(path, out.getvalue()))
        finally:
            state.close()
    return SnapshotPart(objects, rows)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The lock of a subtask's directory, as an error of ours where it cannot be had."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory, LOCK_WAIT_S))
        except TimeoutError as error:
            raise StateError(str(error)) from None
        yield


def _elsewhere(task: SnapshotTask) -> StateError:
    manifest = task.manifest
    return StateError(
        f"no live state of {manifest.stream}/{task.operator} subtask {task.subtask} at checkpoint "
        f"{manifest.checkpoint} on this machine: run the stream here, then take the snapshot"
    )


@dataclass(frozen=True)
class CompareTask:
    """One unit of a checkpoint, to be rebuilt and compared row by row with the snapshot's objects."""

    unit: UnitTask
    snapshot: Mapping[str, list[StoredObject]]
    """table -> its objects in the snapshot"""


def compare_tasks(units: Sequence[UnitTask], objects: Sequence[StoredObject]) -> list[CompareTask]:
    """Each unit of a checkpoint with the objects of its snapshot that hold its operator's tables."""
    tasks = []
    for unit in units:
        by_table: dict[str, list[StoredObject]] = {}
        for stored in objects:
            operator, table = snapshot_of(stored.name)
            if operator == unit.unit.operator:
                by_table.setdefault(table, []).append(stored)
        tasks.append(CompareTask(unit, by_table))
    return tasks


def compare(store: Store, task: CompareTask) -> list[str]:
    """What differs between the restored and the live rows, a line a table; empty where nothing does.

    Raises:
        CorruptObject, ProofFailed: the chain or the snapshot is damaged.
    """
    target = rebuild(store, task.unit)
    operator = task.unit.unit.operator
    differences = []
    for name, table in target.tables.items():
        live = [
            rows
            for stored in task.snapshot.get(name, [])
            for rows, _ in read_base(store.read(stored), table.schema, target.groups, name=stored.name)
        ]
        restored = [rows for rows, _ in table.scan(target.groups)]
        found = differing_keys(table.schema, _whole(restored, table.schema), _whole(live, table.schema))
        if found.num_rows:
            named = [tuple(row.values()) for row in found.slice(0, KEYS_NAMED).to_pylist()]
            differences.append(f"{operator}.{name}: {found.num_rows} keys differ, such as {named}")
    for name, values in target.opaque.items():
        tables = [pq.read_table(pa.BufferReader(store.read(stored))) for stored in task.snapshot.get(name, [])]
        live = {g: v for t in tables for g, v in zip(*t.to_pydict().values(), strict=True) if g in target.groups}
        differing = sorted(g for g in live.keys() | values.keys() if live.get(g) != values.get(g))
        if differing:
            differences.append(
                f"{operator}.{name}: {len(differing)} key groups differ, such as {differing[:KEYS_NAMED]}"
            )
    return differences


def differing_keys(schema: TableSchema, left: pa.Table, right: pa.Table) -> pa.Table:
    """The primary keys (as a table) whose rows are not the same in both tables, or only in one of them.

    Rows are aligned by the hash of the primary key; then every column is compared, bit by bit for floats.
    """
    keys = schema.primary_key.names
    sides = []
    for rows in (left, right):
        hashes = xxhash64(rows.select(keys).columns) if rows.num_rows else np.zeros(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        sides.append((hashes[order], rows.take(pa.array(order))))
    (left_hashes, left), (right_hashes, right) = sides
    left_only = ~np.isin(left_hashes, right_hashes)
    right_only = ~np.isin(right_hashes, left_hashes)
    both_left, both_right = left.filter(pa.array(~left_only)), right.filter(pa.array(~right_only))
    differs = np.zeros(both_left.num_rows, bool)
    if both_left.num_rows != both_right.num_rows:
        # A primary key that is there twice in one of the tables.
        differs = np.ones(both_left.num_rows, bool)
    else:
        for name in schema.rows.names:
            differs |= _unequal(one_array(both_left.column(name)), one_array(both_right.column(name)))
    parts = [
        both_left.filter(pa.array(differs)),
        left.filter(pa.array(left_only)),
        right.filter(pa.array(right_only)),
    ]
    return pa.concat_tables([part.select(keys) for part in parts])


def _unequal(left: pa.Array, right: pa.Array) -> np.ndarray:
    if pa.types.is_floating(left.type):
        bits = pa.int32() if left.type.bit_width == 32 else pa.int64()
        left, right = left.view(bits), right.view(bits)
    one_null = pc.xor(left.is_null(), right.is_null())
    unequal = pc.fill_null(pc.not_equal(left, right), False)
    return pc.or_(one_null, unequal).to_numpy(zero_copy_only=False)


def _whole(parts: list[pa.Table], schema: TableSchema) -> pa.Table:
    return pa.concat_tables(parts) if parts else schema.rows.empty_table()
