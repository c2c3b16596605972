"""Writes restored state as plain Parquet, a directory a table, for any engine to read.

    PATH/<operator>/<table>/part-<first key group>.parquet
    PATH/<operator>/<opaque variable>/part-<first key group>.parquet    columns key_group, value (binary)

Everything is written to a directory beside PATH first and renamed at the end, so PATH is whole or not there.
"""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.manifest import Manifest
from siltstone.errors import Unreachable, UsageError
from siltstone.lifecycle.restore import (
    MemoryState,
    apply_reads,
    check_digests,
    objects_of,
    opaque_digests,
    schemas_of,
    unit_reads,
)
from siltstone.model import Handle, KeyGroupRange
from siltstone.policy.restore_plan import RestorePlan, RestoreUnit, plan_restore
from siltstone.state.digest import checkpoint_digest
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader

UNIT_BYTES = 64 << 20
"""stored bytes that one unit reads at most, where key groups allow; in memory they are several times that"""
OPAQUE_SCHEMA = pa.schema([("key_group", pa.uint16()), ("value", pa.binary())])


@dataclass(frozen=True)
class UnitTask:
    """One unit of a restore: what to read, and where its rows go (None: only proven).

    `whole`: all of the operator's variables are restored; else the unit says which, and no index is looked at.
    """

    unit: RestoreUnit
    manifests: Mapping[int, Manifest]
    checkpoint: int
    path: Path | None
    whole: bool = True


@dataclass(frozen=True)
class UnitResult:
    """What a unit rebuilt: its digests per table or opaque variable, and how many live rows."""

    operator: str
    key_groups: KeyGroupRange
    digests: dict[str, np.ndarray]
    rows: int


def plan_units(
    handles: Mapping[int, Sequence[Handle]], checkpoint: int, max_parallelism: int, parallelism: int
) -> RestorePlan:
    """Plan a restore by `parallelism` units an operator, or more where one would read more than UNIT_BYTES.

    Raises:
        StateError: the chain has a gap.
    """
    plan = plan_restore(handles, checkpoint, max_parallelism, parallelism)
    units = min(max_parallelism, max(parallelism, plan.bytes // UNIT_BYTES))
    return plan if units == parallelism else plan_restore(handles, checkpoint, max_parallelism, units)


def unit_tasks(
    manifests: Mapping[int, Manifest],
    checkpoint: int,
    parallelism: int,
    path: Path | None,
    only: Collection[tuple[str, str]] | None = None,
) -> tuple[list[UnitTask], int]:
    """A task a unit of the restore of `checkpoint`, and how many bytes they read in all.

    There are at least `parallelism` units an operator, and more where one would hold more than UNIT_BYTES.

    Args:
        only: (operator, table or opaque variable) of what is to be restored, and so read; None for everything.

    Raises:
        StateError: the chain has a gap.
    """
    manifest = manifests[checkpoint]
    handles = {
        c: [h for h in m.handles if only is None or (h.operator, h.variable) in only] for c, m in manifests.items()
    }
    plan = plan_units(handles, checkpoint, manifest.max_parallelism, parallelism)
    own = {name: {c: m.of_operator(name) for c, m in manifests.items()} for name in {u.operator for u in plan.units}}
    tasks = [UnitTask(unit, own[unit.operator], checkpoint, path, only is None) for unit in plan.units]
    return tasks, plan.bytes


def chosen(manifest: Manifest, names: Sequence[str]) -> list[tuple[str, str]]:
    """(operator, table or opaque variable) of everything that `names`, each `OPERATOR` or `OPERATOR.VARIABLE`, name.

    Raises:
        UsageError: there is none of that name, with those listed that there are.
    """
    every = [(operator, name) for operator, digests in manifest.digests.items() for name in digests]
    found: list[tuple[str, str]] = []
    for name in names:
        # A list or window is two tables, such as `recent` and `recent.bounds`.
        mine = [pair for pair in every if f"{'.'.join(pair)}.".startswith(f"{name}.")]
        if not mine:
            known = ", ".join(".".join(pair) for pair in every)
            raise UsageError(f"checkpoint {manifest.checkpoint} of {manifest.stream} has no {name!r}: it has {known}")
        found += mine
    return list(dict.fromkeys(found))


def recorded_digest(manifest: Manifest, only: Collection[tuple[str, str]]) -> str:
    """The digest of some tables and opaque variables of a checkpoint, as they were recorded."""
    parts = {
        operator: {name: digest for name, digest in digests.items() if (operator, name) in only}
        for operator, digests in manifest.digests.items()
    }
    return checkpoint_digest({operator: digests for operator, digests in parts.items() if digests})


def whole_digest(results: Sequence[UnitResult], max_parallelism: int) -> str:
    """The checkpoint's digest, put together from its units'."""
    digests: dict[str, dict[str, np.ndarray]] = {}
    for result in results:
        part = slice(result.key_groups.start, result.key_groups.end)
        for name, found in result.digests.items():
            whole = digests.setdefault(result.operator, {}).setdefault(name, np.zeros(max_parallelism, np.uint64))
            whole[part] = found
    return checkpoint_digest(digests)


def rebuild(store: Store, task: UnitTask) -> MemoryState:
    """The unit's state in memory, proven.

    Raises:
        CorruptObject, ProofFailed: the chain is damaged.
    """
    unit, manifest = task.unit, task.manifests[task.checkpoint]
    schemas = schemas_of(manifest, unit.operator)
    if not task.whole:
        schemas = {name: schema for name, schema in schemas.items() if name in unit.tables}
    target = MemoryState.empty(schemas, unit.key_groups, manifest.max_parallelism)
    reads = unit_reads(unit, task.manifests, task.checkpoint) if task.whole else unit.reads
    apply_reads(target, reads, BlockReader(store, objects_of(task.manifests)))
    check_digests(target, unit.operator, manifest, None if task.whole else {*unit.tables, *unit.opaque})
    return target


def restore_unit(store: Store, task: UnitTask) -> UnitResult:
    """Rebuild one unit and write its rows."""
    target = rebuild(store, task)
    unit, groups = task.unit, target.groups
    if task.path is not None:
        write_state(target, task.path / unit.operator)
    part = slice(groups.start, groups.end)
    digests = {name: table.digests[part].copy() for name, table in target.tables.items()}
    digests |= {name: opaque_digests(values, groups) for name, values in target.opaque.items()}
    return UnitResult(unit.operator, groups, digests, sum(table.rows for table in target.tables.values()))


def staging(path: Path) -> Path:
    """Where a restore to `path` is written until it is whole.

    Raises:
        UsageError: there is something at `path` already, or no directory to put it in.
        Unreachable: nothing can be written there.
    """
    path = path.absolute()
    if path.exists():
        raise UsageError(f"{path} exists already: name a directory that does not")
    if not path.parent.is_dir():
        raise UsageError(f"cannot restore to {path}: make the directory {path.parent} first")
    staged = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        staged.mkdir()
    except OSError as error:
        raise Unreachable(f"cannot restore to {path}: {error.strerror}; check permissions and free space") from error
    return staged


def publish(staged: Path, path: Path) -> None:
    """Make a whole restore visible under its own name."""
    os.rename(staged, path)


def discard(staged: Path) -> None:
    """Remove what a failed restore has written."""
    shutil.rmtree(staged, ignore_errors=True)


def opaque_rows(values: Mapping[int, bytes]) -> pa.Table:
    """The opaque values of some key groups as a table."""
    return pa.table([list(values), list(values.values())], schema=OPAQUE_SCHEMA)


def write_state(target: MemoryState, directory: Path) -> None:
    """Write the rows of one operator's key groups below `directory`, a directory a table.

    Raises:
        Unreachable: it cannot be written.
    """
    name = f"part-{target.groups.start:05d}.parquet"
    try:
        for table_name, table in target.tables.items():
            (directory / table_name).mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(directory / table_name / name, table.schema.rows, compression="zstd") as writer:
                for rows, _ in table.scan(target.groups):
                    writer.write_table(rows)
        for variable, values in target.opaque.items():
            (directory / variable).mkdir(parents=True, exist_ok=True)
            pq.write_table(opaque_rows(values), directory / variable / name)
    except OSError as error:
        raise Unreachable(f"cannot write {directory}: {error}; check permissions and free space") from error
