"""Rebuild state from the changelog: apply a base and the deltas after it in order, and prove the result.

The unit of work is one operator in one key-group range (`restore.plan_rules`). Units are independent, so a restore is a
map over them at any parallelism. Blocks are fetched ahead and verified by their checksums at every read
(`store.blocks`, promise 6), and the digest of the rebuilt state must equal the recorded one (promise 1).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from siltstone.errors import ProofFailed
from siltstone.format.base import read_base
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import objects_of, read_manifests, variables_of
from siltstone.format.opaque import decode_opaque
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.files import FileSets, file_sets, is_all_of, stored_object, table_counts
from siltstone.restore.local_files import LocalFiles
from siltstone.restore.plan_rules import Read, RestoreUnit, apply_order, plan_restore
from siltstone.restore.tables import decode_changes, merged_tables, split_reads, wanted_block
from siltstone.state.backend import LOCAL_SETS, KeyedState, RowFilesState, StateSnapshot, SubtaskState
from siltstone.state.backends.heap import HeapTable
from siltstone.state.digest import opaque_digest
from siltstone.state.protocol import apply_delta, get_state, set_state
from siltstone.state.schema import TableSchema
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader

RESERVED_ROWS = 1 << 24
"""maximum rows of a base that are pre-allocated before it is read; a table with more grows while it is filled"""


@dataclass
class MemoryState:
    """State being rebuilt in memory: tables, and opaque values by key group; without steps or before-images."""

    groups: KeyGroupRange
    max_parallelism: int
    tables: dict[str, HeapTable]
    opaque: dict[str, dict[int, bytes]]

    @classmethod
    def make_empty(
        cls, schemas: Mapping[str, TableSchema], groups: KeyGroupRange, max_parallelism: int
    ) -> "MemoryState":
        """Make state with empty tables."""
        tables = {name: HeapTable.in_memory(schema, max_parallelism) for name, schema in schemas.items()}
        return cls(groups, max_parallelism, tables, {})

    def set_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        """Replace the bytes of some key groups."""
        self.opaque.setdefault(variable, {}).update(values)


Block: TypeAlias = pa.Buffer | pa.NativeFile
"""a block's bytes; a file, for a base that is read in parts"""


def apply_handle(target: KeyedState, handle: Handle, groups: Sequence[KeyGroupRange], block: Block) -> int:
    """Apply one block's rows of some key groups to `target`; tables and columns that it does not have are ignored.

    Returns:
        The number of rows or changes applied.
    """
    if handle.kind is Kind.INDEX:
        return 0
    if handle.form is Form.BASE and handle.kind is Kind.INCREMENTAL:
        table = target.tables.get(handle.variable)
        return sum(_apply_base(target, handle, table.schema, part, block) for part in groups) if table else 0
    assert isinstance(block, pa.Buffer), "only bases are read in parts"
    if handle.kind is Kind.OPAQUE:
        values = decode_opaque(block, handle.object)
        target.set_opaque(handle.variable, {g: v for g, v in values.items() if any(g in part for part in groups)})
        return 0
    if handle.variable not in target.tables:
        return 0
    schema = target.tables[handle.variable].schema
    changes, key_groups = decode_changes(handle, schema, groups, block)
    if changes.num_rows:
        apply_delta(target, handle.variable, changes, key_groups)
    return changes.num_rows


def _apply_base(target: KeyedState, handle: Handle, schema: TableSchema, groups: KeyGroupRange, block: Block) -> int:
    count = 0
    for rows, key_groups in read_base(block, schema, groups, name=handle.object, rows=handle.rows):
        set_state(target, handle.variable, rows, key_groups)
        count += rows.num_rows
    return count


def apply_reads(
    target: KeyedState,
    reads: Sequence[Read],
    reader: BlockReader,
    scratch: Path | None = None,
    files: FileSets | None = None,
) -> None:
    """Fill empty state from blocks, given in the order in which they apply; each row is written once."""
    tables, others = split_reads(reads)
    for read, block in zip(others, reader.blocks(map(wanted_block, others)), strict=True):
        apply_handle(target, read.handle, read.key_groups, block)
    for name, table in target.tables.items():
        table.reserve(sum(map(_count_base_rows, (read for read in tables if read.handle.variable == name))))
    schemas = {name: table.schema for name, table in target.tables.items()}
    for name, batches in merged_tables(tables, schemas, reader, target.groups, target.max_parallelism, scratch, files):
        forms = {read.handle.form for read in tables if read.handle.variable == name}
        if forms == {Form.FILES} and isinstance(target, RowFilesState):
            target.load_rows(name, batches)
            continue
        for rows, key_groups in batches:
            set_state(target, name, rows, key_groups)


def _count_base_rows(read: Read) -> int:
    """Estimate how many rows of a base are wanted; 0 for a delta, which mostly changes existing rows.

    At most the block's bytes, and `RESERVED_ROWS`: the handle's count has not been verified yet.
    """
    handle = read.handle
    wanted = sum(map(len, read.key_groups)) / max(1, len(handle.key_groups))
    rows = min(handle.rows, handle.length, RESERVED_ROWS)
    return int(rows * wanted) if handle.form is Form.BASE else 0


def unit_reads(unit: RestoreUnit, manifests: Mapping[int, Manifest]) -> list[Read]:
    """Return what a unit reads, in order, and the indexes of the segments that begin in its key groups.

    The indexes only have to be intact, since the handles hold the same information.
    """
    segments = {(r.checkpoint, r.handle.key_groups) for r in unit.reads if r.handle.kind is Kind.INCREMENTAL}
    indexes = [
        Read(c, handle, ())
        for c in sorted({c for c, _ in segments})
        for handle in manifests[c].handles
        if handle.kind is Kind.INDEX and handle.operator == unit.operator and (c, handle.key_groups) in segments
        if handle.key_groups.start in unit.key_groups
    ]
    return sorted(unit.reads + indexes, key=apply_order)


def digests_of(state: KeyedState | StateSnapshot, *, held: bool = False) -> dict[str, np.ndarray]:
    """Return table or opaque variable -> digest (uint64) per key group of the state.

    Args:
        held: of broadcast tables those of all key groups, since the state has their rows.
    """
    digests = {}
    for name, table in state.tables.items():
        part = table.schema.held(state.groups, len(table.digests)) if held else state.groups
        digests[name] = table.digests[part.start : part.end].copy()
    return digests | {name: opaque_digests(values, state.groups) for name, values in state.opaque.items()}


def check_digests(
    found: Mapping[str, np.ndarray],
    operator: str,
    groups: KeyGroupRange,
    manifest: Manifest,
    only: Collection[str] | None = None,
) -> None:
    """Compare rebuilt digests with the recorded ones, key group by key group (promise 1).

    Args:
        found: the result of `digests_of`.
        only: compare only these variables; None for all.

    Raises:
        ProofFailed: they differ; the message names checkpoint, variable and key groups.
    """
    nothing = np.zeros(len(groups), np.uint64)
    for name, recorded in manifest.digests[operator].items():
        if only is None or name in only:
            where = f"checkpoint {manifest.checkpoint} of {manifest.stream}: {operator}.{name}"
            own = recorded[groups.start : groups.end]
            compare_digests(where, found.get(name, nothing), own, np.arange(groups.start, groups.end))


def compare_digests(where: str, found: np.ndarray, recorded: np.ndarray, key_groups: np.ndarray) -> None:
    """Compare digests (uint64[n]) of n key groups; `where` names checkpoint, operator and variable.

    Raises:
        ProofFailed: they differ.
    """
    differing = key_groups[found != recorded]
    if len(differing):
        raise ProofFailed(
            f"{where} does not have its recorded digest in {len(differing)} key groups from {differing[0]} on",
            advice="restore an older checkpoint",
        )


def opaque_digests(values: Mapping[int, bytes], groups: KeyGroupRange) -> np.ndarray:
    """Return the digest (uint64) of the opaque value of each of `groups`; 0 if it has none."""
    digests = np.zeros(len(groups), np.uint64)
    for group, value in values.items():
        digests[group - groups.start] = opaque_digest(value)
    return digests


def load_state(
    state: SubtaskState,
    store: Store,
    stored: Sequence[StoredObject],
    operator: str,
    step: int,
    stream: str | None = None,
    scratch: Path | None = None,
    local: LocalFiles | None = None,
    trusted: Collection[str] = (),
    former: Iterable[tuple[SubtaskState, KeyGroupRange]] | None = None,
) -> int:
    """Fill empty working state from a chain, prove it, and make it version `step` with no change pending.

    Key groups that other working state on this machine has, with the recorded digests, come from there instead. If
    there is none, files that hold just these tables and key groups and that this run or this machine wrote become the
    state's own, without reading a row: by their checksums, they are the files that had the recorded digests. Other
    files are read row by row.

    Args:
        stored: the chain's manifest objects, the target's last; none for a new operator, which stays empty.
        stream: see `read_manifest`.
        scratch: see `Changes` and `BlockReader`.
        local: files that are on this machine already.
        trusted: see `FileSets`.
        former: state of the same variables at the same version, and which of its key groups are wanted; each is asked
            for once the one before it was used.

    Returns:
        The bytes of blocks read.

    Raises:
        CorruptObject, ProofFailed, StateError: the chain is damaged, or what `former` has is.
    """
    manifests = read_manifests(store, stored, stream)
    reader = BlockReader(store, objects_of(manifests), scratch)
    if manifests:
        target = manifests[max(manifests)]
        shared = {name for name, table in state.tables.items() if table.schema.broadcast}
        list_reads = partial(_list_reads, manifests, operator, state, shared)
        with FileSets(reader, local, trusted) as files:
            if former is None:
                reads = list_reads([state.groups])
                if _adopt_files(state, reads, files, target.digests[operator]):
                    reads = [read for read in reads if read.handle.form is not Form.FILES]
                state.begin(step, tracking=False)
            else:
                state.begin(step, tracking=False)
                reads = list_reads(_move_groups(state, former, target.digests[operator], shared))
            apply_reads(state, reads, reader, scratch, files)
        check_digests(digests_of(state), operator, state.groups, target, {*state.tables, *state.opaque} - shared)
        every = KeyGroupRange(0, state.max_parallelism)
        check_digests(digests_of(state, held=True), operator, every, target, shared)
    else:
        state.begin(step, tracking=False)
    for table in state.tables.values():
        table.mark()
    state.commit()
    state.release(step)
    return reader.fetched_bytes


def _move_groups(
    state: SubtaskState,
    former: Iterable[tuple[SubtaskState, KeyGroupRange]],
    digests: Mapping[str, np.ndarray],
    shared: Set[str],
) -> list[KeyGroupRange]:
    """Put into empty state what `former` has of its key groups, but for broadcast tables; return those still missing.

    DBSP: operators on other workers `get_state` of a partition, and `set_state`.
    """
    left = [state.groups]
    for other, groups in former:
        found, nothing = digests_of(other), np.zeros(state.max_parallelism, np.uint64)
        at = slice(groups.start - other.groups.start, groups.end - other.groups.start)
        recorded = {name: digests.get(name, nothing)[groups.start : groups.end] for name in found.keys() - shared}
        if any(not np.array_equal(found[name][at], of) for name, of in recorded.items()):
            continue
        for name in sorted(state.tables.keys() - shared):
            state.tables[name].reserve(other.tables[name].rows * len(state.groups) // len(other.groups))
            batches = get_state(other, name, groups)
            if isinstance(state, RowFilesState):  # so is the other one, which has no other order than that of keys
                state.load_rows(name, batches)
                continue
            for rows, key_groups in batches:
                set_state(state, name, rows, key_groups)
        for name, values in other.opaque.items():
            state.set_opaque(name, {group: value for group, value in values.items() if group in groups})
        left = [rest for part in left for rest in part.without(groups)]
    return left


def _list_reads(
    manifests: Mapping[int, Manifest],
    operator: str,
    state: SubtaskState,
    shared: Set[str],
    parts: Sequence[KeyGroupRange],
) -> list[Read]:
    """List what the restore of an operator reads in some parts of its key groups; of broadcast tables in all.

    Variables that are being dropped, which `state` does not have, are not rebuilt.
    """
    own = {*state.tables, *state.opaque}
    handles = {c: [h for h in m.handles if h.operator == operator and h.variable in own] for c, m in manifests.items()}
    # The checkpoint has nothing of a variable that did not change in its interval.
    known, reads = variables_of(manifests[max(manifests)], operator), list[Read]()
    for groups, only in [*((part, own - shared) for part in parts), (KeyGroupRange(0, state.max_parallelism), shared)]:
        wanted = {name: kind for name, kind in known.items() if name[1] in only}
        plan = plan_restore(handles, max(manifests), state.max_parallelism, 1, wanted, groups)
        reads += unit_reads(plan.units[0], manifests) if plan.units else []
    return reads


def _adopt_files(
    state: SubtaskState,
    reads: Sequence[Read],
    opened: FileSets,
    digests: Mapping[str, np.ndarray],
) -> bool:
    """Let empty state have files of its own run or machine that are all of its tables, and nothing else; return whether
    there are such."""
    tables, sets = [r for r in reads if r.handle.kind is Kind.INCREMENTAL], [*file_sets(reads)]
    if [groups for _, groups in sets] != [state.groups] or not isinstance(state, RowFilesState):
        return False
    if any(read.handle.form is not Form.FILES for read in tables):
        return False
    files = opened.open([read.handle for read in tables])
    schemas = {name: table.schema for name, table in state.tables.items()}
    if not files.is_own or not is_all_of(files.index, schemas, state.groups, state.max_parallelism):
        return False
    state.adopt_rows(files.directory, table_counts(files.index), {name: digests[name] for name in schemas})
    kept = LocalFiles(state.directory / LOCAL_SETS)
    kept.keep(files.directory, stored_object(files.handle), files.objects)
    return True
