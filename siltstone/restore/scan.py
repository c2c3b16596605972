"""Read one table of a checkpoint in independent pieces, for query engines.

A piece is some key groups of the table. It reads only the blocks, and only the row groups of bases, that hold them; a
table without deltas is streamed without being rebuilt. Every block is verified by its checksum (promise 6). If all
columns are read, the digests of the key groups are compared, too (a restore equals the recorded state: promise 1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.format.base import read_base
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import opaque_of, schemas_of
from siltstone.model import Form, KeyGroupRange, Kind, StoredObject
from siltstone.restore.export import UNIT_BYTES
from siltstone.restore.keys import rows_of_keys
from siltstone.restore.merge import MERGED_BYTES
from siltstone.restore.plan_rules import Read, plan_restore
from siltstone.restore.restore import MemoryState, apply_reads, compare_digests, opaque_digests
from siltstone.restore.tables import add_digests, merged_tables, wanted_block
from siltstone.state.columns import row_bytes, split_by_bytes
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.nested import nested_columns
from siltstone.state.schema import OPAQUE_SCHEMA, TableSchema
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader


@dataclass(frozen=True)
class TableShape:
    """One table or opaque variable of a checkpoint, as recorded.

    Attributes:
        schema: None for an opaque variable.
        key: the key columns: the operator's, or those of a broadcast table.
    """

    operator: str
    name: str
    schema: TableSchema | None
    key: pa.Schema

    @classmethod
    def of(cls, manifest: Manifest, operator: str, name: str) -> "TableShape":
        """Return the shape of an operator's table (such as `totals` or `window.bounds`) or opaque variable `name`.

        Raises:
            UsageError: it does not exist; the message lists what does.
        """
        where = f"checkpoint {manifest.checkpoint} of {manifest.stream}"
        if operator not in manifest.operators:
            raise UsageError(f"{where} has no operator {operator!r}: it has {', '.join(sorted(manifest.operators))}")
        tables = schemas_of(manifest, operator)
        opaque = opaque_of(manifest, operator)
        if name not in tables and name not in opaque:
            known = ", ".join(sorted({*tables, *opaque}))
            raise UsageError(f"{where}: operator {operator} has no variable {name!r}: it has {known}")
        key = TableSchema.from_json({"key": manifest.operators[operator]["key"], "subkey": [], "value": []}).primary_key
        return cls(operator, name, tables.get(name), tables[name].key if name in tables else key)

    @property
    def columns(self) -> pa.Schema:
        """The columns of its rows: `TableSchema.shown_rows`, or key_group and value (binary) for an opaque variable."""
        return OPAQUE_SCHEMA if self.schema is None else self.schema.shown_rows

    def select(self, names: Sequence[str]) -> pa.Schema:
        """Return some of the columns, in the order of `names`.

        Raises:
            UsageError: a column does not exist, or is named twice.
        """
        for i, name in enumerate(names):
            if name not in self.columns.names or name in names[:i]:
                what = "is named twice" if name in self.columns.names else "does not exist"
                raise UsageError(f"column {name!r} of {self.name} {what}: it has {', '.join(self.columns.names)}")
        return pa.schema([self.columns.field(name) for name in names])


@dataclass(frozen=True, eq=False)
class Selection:
    """The part of a table to read; None means all.

    Attributes:
        columns: names, in the order wanted.
        key_groups: disjoint, ascending.
        keys: rows of operator key columns (`restore.keys`); for an opaque variable, which has no keys, they only select
            key groups.
    """

    columns: tuple[str, ...]
    key_groups: tuple[KeyGroupRange, ...] | None = None
    keys: pa.Table | None = None


@dataclass(frozen=True, eq=False)
class ScanTask:
    """One piece of a scan: what to read for some key groups, and the digests (uint64[key groups]) they must have."""

    where: str
    shape: TableShape
    max_parallelism: int
    key_groups: np.ndarray
    reads: tuple[Read, ...]
    objects: tuple[StoredObject, ...]
    digests: np.ndarray
    columns: tuple[str, ...]
    keys: pa.Table | None


def plan_scan(
    manifests: Mapping[int, Manifest], shape: TableShape, selection: Selection, parallelism: int | None = None
) -> list[ScanTask]:
    """Split a scan into tasks with about equally many key groups, at least one task.

    Args:
        manifests: those of the chain; the newest belongs to the checkpoint to read.
        parallelism: the number of tasks, at most one per key group; by default the number of subtasks that wrote the
            checkpoint, or more if one would read more than `UNIT_BYTES`.

    Raises:
        UsageError: the keys are in none of the key groups.
        StateError: the chain has a gap.
    """
    manifest = manifests[max(manifests)]
    wanted = _wanted_groups(selection, manifest.max_parallelism)
    reads, subtasks = _reads(manifests, shape, wanted)
    bounded = [r for r in reads if r.handle.form is not Form.FILES]
    size = sum(r.handle.length * sum(map(len, r.key_groups)) // len(r.handle.key_groups) for r in bounded)
    pieces = min(len(wanted), parallelism or max(subtasks, size // UNIT_BYTES, 1))
    objects = {o.name: o for m in manifests.values() for o in m.objects}
    recorded = manifest.digests[shape.operator].get(shape.name, np.zeros(manifest.max_parallelism, np.uint64))
    owners = None if selection.keys is None else key_groups(xxhash64(selection.keys.columns), manifest.max_parallelism)
    tasks = []
    for groups in np.array_split(wanted, pieces):
        own = _restrict(reads, groups)
        keys = None if owners is None or selection.keys is None else selection.keys.filter(np.isin(owners, groups))
        tasks.append(
            ScanTask(
                where=f"checkpoint {manifest.checkpoint} of {manifest.stream}: {shape.operator}.{shape.name}",
                shape=shape,
                max_parallelism=manifest.max_parallelism,
                key_groups=groups,
                reads=own,
                objects=tuple(objects[name] for name in {r.handle.object for r in own} if name in objects),
                digests=recorded[groups],
                columns=selection.columns,
                keys=keys,
            )
        )
    return tasks


def scan(store: Store, task: ScanTask, scratch: Path | None = None) -> Iterator[pa.Table]:
    """Yield the rows of one task, in bounded batches with its columns. `scratch`: see `BlockReader`.

    The digests are compared after the last batch: for a proof, read all batches.

    Raises:
        CorruptObject, ProofFailed: what was stored is damaged.
    """
    reader = BlockReader(store, task.objects, scratch)
    if task.shape.schema is None:
        yield _opaque_rows(reader, task).select(task.columns)
        return
    schema = task.shape.schema
    keys = () if task.keys is None else task.keys.column_names
    needed = [name for name in schema.rows.names if name in task.columns or name in keys]
    whole = len(needed) == len(schema.rows)
    if any(r.handle.form is not Form.BASE for r in task.reads):
        batches = _scan_merged(reader, task, schema, needed, whole)
    else:
        batches = _scan_bases(reader, task, schema, needed, whole)
    for rows in batches:
        found = (rows if task.keys is None else rows_of_keys(rows, task.keys)).select(task.columns)
        if schema.nested:
            for part in split_by_bytes(row_bytes(found), MERGED_BYTES):
                yield nested_columns(found.slice(part.start, part.stop - part.start), schema.nested)
        else:
            yield found


def _wanted_groups(selection: Selection, max_parallelism: int) -> np.ndarray:
    """Return the selected key groups (int64[n]), ascending."""
    ranges = selection.key_groups or (KeyGroupRange(0, max_parallelism),)
    groups = np.concatenate([np.arange(r.start, r.end) for r in ranges])
    if selection.keys is not None:
        groups = np.intersect1d(groups, key_groups(xxhash64(selection.keys.columns), max_parallelism))
    if not len(groups):
        raise UsageError("none of the keys is in the given key groups: give only keys, or only key groups")
    return groups


def _reads(manifests: Mapping[int, Manifest], shape: TableShape, wanted: np.ndarray) -> tuple[list[Read], int]:
    """Return what the wanted key groups need, in the order in which it applies, and how many subtasks wrote them at the
    newest checkpoint."""
    manifest = manifests[max(manifests)]
    handles = {
        c: [h for h in m.handles if (h.operator, h.variable) == (shape.operator, shape.name)]
        for c, m in manifests.items()
    }
    hull = KeyGroupRange(int(wanted[0]), int(wanted[-1]) + 1)
    variables = {(shape.operator, shape.name): Kind.OPAQUE if shape.schema is None else Kind.INCREMENTAL}
    plan = plan_restore(handles, manifest.checkpoint, manifest.max_parallelism, 1, variables, hull)
    reads = [read for unit in plan.units for read in unit.reads]
    writers = {h.key_groups for h in handles[manifest.checkpoint] if h.key_groups.intersect(hull)}
    return list(_restrict(reads, wanted)), len(writers)


def _restrict(reads: Sequence[Read], groups: np.ndarray) -> tuple[Read, ...]:
    """Restrict each read to these key groups; drop reads without any of them."""
    narrowed = []
    ranges = _ranges(groups)
    for read in reads:
        parts = (mine.intersect(part) for mine in read.key_groups for part in ranges)
        if kept := tuple(part for part in parts if part):
            narrowed.append(Read(read.checkpoint, read.handle, kept))
    return tuple(narrowed)


def _ranges(groups: np.ndarray) -> list[KeyGroupRange]:
    runs = np.split(groups, np.flatnonzero(np.diff(groups) != 1) + 1)
    return [KeyGroupRange(int(run[0]), int(run[-1]) + 1) for run in runs]


def _scan_bases(
    reader: BlockReader, task: ScanTask, schema: TableSchema, needed: list[str], whole: bool
) -> Iterator[pa.Table]:
    """Yield the rows of bases, without deltas to merge."""
    found = np.zeros(task.max_parallelism, np.uint64)
    wanted = (replace(wanted_block(read), in_parts=wanted_block(read).in_parts or not whole) for read in task.reads)
    for read, block in zip(task.reads, reader.blocks(wanted), strict=True):
        for part in read.key_groups:
            recorded = read.handle.rows
            for rows, owners in read_base(block, schema, part, needed, name=read.handle.object, rows=recorded):
                if whole:
                    found += group_sums(row_digests(rows), owners, task.max_parallelism)
                yield rows
    if whole:
        compare_digests(task.where, found[task.key_groups], task.digests, task.key_groups)


def _scan_merged(
    reader: BlockReader, task: ScanTask, schema: TableSchema, needed: list[str], whole: bool
) -> Iterator[pa.Table]:
    """Yield merged rows, with the primary key and only the value columns that are needed."""
    pruned = TableSchema(schema.key, schema.subkey, pa.schema([f for f in schema.value if f.name in needed]))
    hull = KeyGroupRange(int(task.key_groups[0]), int(task.key_groups[-1]) + 1)
    found = np.zeros(task.max_parallelism, np.uint64)
    for _, batches in merged_tables(task.reads, {task.shape.name: pruned}, reader, hull, task.max_parallelism):
        for rows, _ in add_digests(batches, found) if whole else batches:
            yield rows
    if whole:
        compare_digests(task.where, found[task.key_groups], task.digests, task.key_groups)


def _opaque_rows(reader: BlockReader, task: ScanTask) -> pa.Table:
    hull = KeyGroupRange(int(task.key_groups[0]), int(task.key_groups[-1]) + 1)
    target = MemoryState.make_empty({}, hull, task.max_parallelism)
    apply_reads(target, task.reads, reader)
    values = target.opaque.get(task.shape.name, {})
    found = opaque_digests(values, hull)[task.key_groups - hull.start]
    compare_digests(task.where, found, task.digests, task.key_groups)
    return pa.table([list(values), list(values.values())], schema=OPAQUE_SCHEMA)
