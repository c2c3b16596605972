"""Write restored state as plain Parquet, one directory per table, for any engine to read.

    PATH/<operator>/<table>/part-<first key group>.parquet
    PATH/<operator>/<opaque variable>/part-<first key group>.parquet    columns key_group, value (binary)

Everything is written to a directory beside PATH first and renamed at the end, so PATH is complete or absent.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.errors import Unreachable, UsageError
from siltstone.format.base import write_base
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import objects_of, schemas_of, variables_of
from siltstone.model import Handle, KeyGroupRange, Kind
from siltstone.restore.live_rules import Variable
from siltstone.restore.merge import Batch
from siltstone.restore.plan_rules import Read, RestorePlan, RestoreUnit, plan_restore
from siltstone.restore.restore import MemoryState, apply_reads, check_digests, digests_of, unit_reads
from siltstone.restore.tables import add_digests, merged_tables, split_reads
from siltstone.state.digest import assemble_digests, checkpoint_digest
from siltstone.state.schema import OPAQUE_SCHEMA, TableSchema
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader
from siltstone.store.directories import path_below
from siltstone.store.private import make_private_directory, open_private, private_mode

UNIT_BYTES = 64 << 20
"""maximum stored bytes that one unit reads, unless a key group has more; they take several times that in memory"""


@dataclass(frozen=True)
class UnitTask:
    """One unit of a restore: what to read, and where to write its rows (None: only prove them).

    `whole`: all of the operator's variables are restored; else only the unit's variables, without reading indexes.
    """

    unit: RestoreUnit
    manifests: Mapping[int, Manifest]
    checkpoint: int
    path: Path | None
    whole: bool = True


@dataclass(frozen=True)
class UnitResult:
    """What a unit rebuilt: digests per table or opaque variable, the number of live rows, and the seconds it took."""

    operator: str
    key_groups: KeyGroupRange
    digests: dict[str, np.ndarray]
    rows: int
    seconds: float = 0.0


def plan_units(
    handles: Mapping[int, Sequence[Handle]],
    checkpoint: int,
    max_parallelism: int,
    parallelism: int,
    variables: Mapping[Variable, Kind],
) -> RestorePlan:
    """Plan a restore of some variables with `parallelism` units per operator, or more if one would read more than
    UNIT_BYTES.

    Raises:
        StateError: the chain has a gap.
    """
    plan = plan_restore(handles, checkpoint, max_parallelism, parallelism, variables)
    # Rows of files are streamed, and each unit opens all of the files that it needs.
    units = min(max_parallelism, max(parallelism, (plan.bytes - plan.files_bytes) // UNIT_BYTES))
    if units == parallelism:
        return plan
    return plan_restore(handles, checkpoint, max_parallelism, units, variables)


def unit_tasks(
    manifests: Mapping[int, Manifest],
    checkpoint: int,
    parallelism: int,
    path: Path | None,
    only: Collection[tuple[str, str]] | None = None,
) -> tuple[list[UnitTask], int]:
    """Return one task per unit of the restore of `checkpoint`, and the total bytes they read.

    Each operator has at least `parallelism` units, more if one would read more than UNIT_BYTES.

    Args:
        only: (operator, table or opaque variable) to restore; None for everything.

    Raises:
        StateError: the chain has a gap.
    """
    manifest = manifests[checkpoint]
    handles = {
        c: [h for h in m.handles if only is None or (h.operator, h.variable) in only] for c, m in manifests.items()
    }
    variables = {
        name: kind
        for operator in manifest.operators
        for name, kind in variables_of(manifest, operator).items()
        if only is None or name in only
    }
    plan = plan_units(handles, checkpoint, manifest.max_parallelism, parallelism, variables)
    own = {name: {c: m.of_operator(name) for c, m in manifests.items()} for name in {u.operator for u in plan.units}}
    tasks = [UnitTask(unit, own[unit.operator], checkpoint, path, only is None) for unit in plan.units]
    return tasks, plan.bytes


def select_tables(manifest: Manifest, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (operator, table or opaque variable) of everything in `names`, each `OPERATOR` or `OPERATOR.VARIABLE`.

    Raises:
        UsageError: the checkpoint does not have one of them; the message lists what it has.
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
    """Return the digest of some tables and opaque variables of a checkpoint, as recorded."""
    parts = {
        operator: {name: digest for name, digest in digests.items() if (operator, name) in only}
        for operator, digests in manifest.digests.items()
    }
    return checkpoint_digest({operator: digests for operator, digests in parts.items() if digests})


def whole_digest(results: Sequence[UnitResult], max_parallelism: int) -> str:
    """Assemble the checkpoint's digest from those of its units."""
    found = ((result.operator, result.key_groups, result.digests) for result in results)
    return checkpoint_digest(assemble_digests(found, max_parallelism))


def rebuild(store: Store, task: UnitTask, scratch: Path | None = None) -> MemoryState:
    """Rebuild a unit's state in memory and prove it; `scratch`: see `BlockReader`.

    Raises:
        CorruptObject, ProofFailed: the chain is damaged.
    """
    unit, manifest = task.unit, task.manifests[task.checkpoint]
    target = MemoryState.make_empty(_schemas(task), unit.key_groups, manifest.max_parallelism)
    apply_reads(target, _reads(task), BlockReader(store, objects_of(task.manifests), scratch))
    _prove(task, digests_of(target))
    return target


def restore_unit(store: Store, task: UnitTask, scratch: Path | None = None) -> UnitResult:
    """Rebuild one unit and write its rows in batches; prove them after the last one. `scratch`: see `BlockReader`.

    Raises:
        CorruptObject, ProofFailed: the chain is damaged.
        Unreachable: its rows cannot be written.
    """
    start = time.perf_counter()
    unit, max_parallelism = task.unit, task.manifests[task.checkpoint].max_parallelism
    groups, schemas = unit.key_groups, _schemas(task)
    reader = BlockReader(store, objects_of(task.manifests), scratch)
    reads, others = split_reads(_reads(task))
    state = MemoryState.make_empty({}, groups, max_parallelism)
    apply_reads(state, others, reader)
    digests, count = digests_of(state), 0
    for name, batches in merged_tables(reads, schemas, reader, groups, max_parallelism):
        found = np.zeros(max_parallelism, np.uint64)
        passing = add_digests(batches, found)
        if task.path is None:
            count += sum(rows.num_rows for rows, _ in passing)
        else:
            count += _write_table(path_below(task.path, unit.operator), name, schemas[name], groups, passing)
        digests[name] = found[groups.start : groups.end]
    _prove(task, digests)
    if task.path is not None:
        _write_opaque(path_below(task.path, unit.operator), state)
    return UnitResult(unit.operator, groups, digests, count, time.perf_counter() - start)


def _schemas(task: UnitTask) -> dict[str, TableSchema]:
    """Return the schemas of the tables that are restored."""
    schemas = schemas_of(task.manifests[task.checkpoint], task.unit.operator)
    return {name: schema for name, schema in schemas.items() if task.whole or name in task.unit.tables}


def _reads(task: UnitTask) -> list[Read]:
    return unit_reads(task.unit, task.manifests) if task.whole else task.unit.reads


def _prove(task: UnitTask, digests: Mapping[str, np.ndarray]) -> None:
    unit, only = task.unit, None if task.whole else {*task.unit.tables, *task.unit.opaque}
    check_digests(digests, unit.operator, unit.key_groups, task.manifests[task.checkpoint], only)


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """Yield a directory beside `path` that becomes `path` when the block ends well, and is gone when it does not.

    Raises:
        UsageError: `path` exists, or its parent directory does not.
        Unreachable: the directory cannot be written.
    """
    path = path.absolute()
    if path.exists():
        raise UsageError(f"{path} exists already: name a directory that does not exist")
    if not path.parent.is_dir():
        raise UsageError(f"cannot restore to {path}: make the directory {path.parent} first")
    staged = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        staged.mkdir(private_mode(of_directory=True))
    except OSError as error:
        raise Unreachable(f"cannot restore to {path}: {error.strerror}; check permissions and free space") from error
    try:
        yield staged
        os.rename(staged, path)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def opaque_rows(values: Mapping[int, bytes]) -> pa.Table:
    """Make a table of the opaque values of some key groups."""
    return pa.table([list(values), list(values.values())], schema=OPAQUE_SCHEMA)


def write_state(target: MemoryState, directory: Path) -> None:
    """Write the rows of one operator's key groups below `directory`, one directory per table.

    Raises:
        Unreachable: the directory cannot be written.
    """
    for name, table in target.tables.items():
        _write_table(directory, name, table.schema, target.groups, table.scan(target.groups))
    _write_opaque(directory, target)


def _write_table(
    directory: Path, name: str, schema: TableSchema, groups: KeyGroupRange, batches: Iterator[Batch]
) -> int:
    with _part(directory, name, groups) as path, open(path, "wb", opener=open_private) as out:
        return write_base(out, schema, batches, key_groups=False)


def _write_opaque(directory: Path, target: MemoryState) -> None:
    for variable, values in target.opaque.items():
        with _part(directory, variable, target.groups) as path, open(path, "wb", opener=open_private) as out:
            pq.write_table(opaque_rows(values), out)


@contextmanager
def _part(directory: Path, name: str, groups: KeyGroupRange) -> Iterator[Path]:
    """Give the path of the file for some key groups of one table, to be written in the block.

    Raises:
        Unreachable: the file cannot be written.
    """
    try:
        path = path_below(directory, name)
        make_private_directory(path)
        yield path_below(path, f"part-{groups.start:05d}.parquet")
    except OSError as error:
        raise Unreachable(f"cannot write {directory}: {error}; check permissions and free space") from error
