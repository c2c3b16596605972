"""Prove checkpoints: walk each chain once, read each block once, and compare every recorded digest on the way.

One task is one operator in one key-group range from a base on (`restore.plan_rules.plan_proof`). It keeps the state
in memory and applies checkpoint after checkpoint. Its digests, built from the rows that were read, must equal those
that the stream updated change by change (promise 1).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from siltstone.errors import CorruptObject, StateError
from siltstone.format.index import IndexEntry
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import objects_of, schemas_of, variables_of
from siltstone.format.segment import read_index
from siltstone.model import Form, Handle, Kind, StoredObject
from siltstone.restore.files import FileSets, file_sets
from siltstone.restore.index_chain import follow
from siltstone.restore.plan_rules import Read, VerifyChain, bytes_of
from siltstone.restore.restore import Block, MemoryState, apply_handle, check_digests, digests_of
from siltstone.state.protocol import key_batch, set_state
from siltstone.state.schema import TableSchema
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader, Wanted


@dataclass(frozen=True)
class Failure:
    """Why a checkpoint is not proven; `object` is the damaged object, if one is known."""

    checkpoint: int
    reason: str
    object: str | None = None


@dataclass(frozen=True)
class ProofTask:
    """One chain, and the manifests of its checkpoints."""

    chain: VerifyChain
    manifests: Mapping[int, Manifest]


@dataclass(frozen=True)
class IndexCheck:
    """The indexes that one subtask wrote at one checkpoint, which must agree with the manifest's handles.

    `bases` are table -> the step whose base of it, by the same subtask, replaces its earlier changes in the checkpoint.
    `dependents` are the checkpoints that are not proven without the indexes.
    """

    checkpoint: int
    indexes: tuple[Handle, ...]
    data: tuple[Handle, ...]
    bases: Mapping[str, int]
    objects: tuple[StoredObject, ...]
    dependents: tuple[int, ...]


@dataclass(frozen=True)
class ChainProof:
    """The result of walking one chain; without failures, all its checkpoints are proven.

    `restore_s` and `restore_bytes`: seconds and bytes that a restore of each proven checkpoint alone takes: of each
    variable the newest base and the deltas after it, and one comparison of digests.
    """

    failures: list[Failure]
    restore_s: dict[int, float]
    restore_bytes: dict[int, int]


def prove(
    store: Store,
    task: ProofTask,
    visit: Callable[[int, MemoryState], None] = lambda *_: None,
    scratch: Path | None = None,
) -> ChainProof:
    """Walk one chain.

    Args:
        visit: called with each proven checkpoint and its state, which is valid only during the call.
        scratch: see `BlockReader`.
    """
    restore_s: dict[int, float] = {}
    restore_bytes: dict[int, int] = {}
    chain, manifests = task.chain, task.manifests
    last = manifests[chain.steps[-1].checkpoint]
    # The newest schema of each table: a key may have become nullable.
    schemas = {k: v for step in chain.steps for k, v in schemas_of(manifests[step.checkpoint], chain.operator).items()}
    target = MemoryState.make_empty({}, chain.key_groups, last.max_parallelism)
    failures: list[Failure] = []
    reader = BlockReader(store, objects_of(manifests), scratch)
    tables = [[h for h in step.handles if h.kind is Kind.INCREMENTAL] for step in chain.steps]
    blocks = reader.blocks(Wanted(h) for handles in tables for h in handles if h.form is not Form.FILES)
    walk = _WalkState(target, reader)
    for position, (step, handles) in enumerate(zip(chain.steps, tables, strict=True)):
        names = {name for _, name in variables_of(manifests[step.checkpoint], chain.operator)}
        _follow_variables(target, names, schemas)
        try:
            walk.apply_tables(handles, blocks)
        except CorruptObject as error:
            behind = [s.checkpoint for s in chain.steps[position:] if s.proves]
            failures += [Failure(c, str(error), walk.name_damaged(error)) for c in behind]
            blocks.close()
            break
        walk.add_opaque(h for h in step.handles if h.kind is Kind.OPAQUE)
        if step.proves:
            try:
                walk.apply_opaque()
                began = time.perf_counter()
                check_digests(digests_of(target), chain.operator, target.groups, manifests[step.checkpoint])
                restore_s[step.checkpoint] = sum(walk.live.values()) + time.perf_counter() - began
                restore_bytes[step.checkpoint] = bytes_of(walk.live)
                visit(step.checkpoint, target)
            except StateError as error:
                failures.append(Failure(step.checkpoint, str(error), walk.name_damaged(error)))
        walk.end(step.ends)
    return ChainProof(failures, restore_s, restore_bytes)


class _WalkState:
    """The state at one checkpoint after another, and what a restore of each alone reads.

    Opaque values are read when a checkpoint is proven. What was replaced before is not read, and damage to them
    concerns only the checkpoints that need them.
    """

    def __init__(self, target: MemoryState, reader: BlockReader) -> None:
        self._target, self._reader = target, reader
        self.live: dict[Handle, float] = {}
        """what a restore reads -> the seconds that it took to read and apply it"""
        self._unread: list[Handle] = []
        """opaque values that the target does not have yet, in order"""

    def apply_tables(self, handles: Sequence[Handle], blocks: Iterator[Block]) -> None:
        """Apply the handles of tables of the next checkpoint; `blocks` yields those that are not files."""
        files = [h for h in handles if h.form is Form.FILES]
        self.live |= dict.fromkeys(handles, 0.0)
        began = time.perf_counter()
        _apply_files(self._target, files, self._reader)
        self.live |= dict.fromkeys(files, (time.perf_counter() - began) / max(1, len(files)))
        for handle in (h for h in handles if h.form is not Form.FILES):
            began = time.perf_counter()
            _apply(self._target, handle, next(blocks))
            self.live[handle] = time.perf_counter() - began

    def add_opaque(self, handles: Iterable[Handle]) -> None:
        """Go on to the opaque values of the next checkpoint, in the order in which they apply."""
        added = dict.fromkeys(handles, 0.0)
        self.live |= added
        self._unread += added

    def apply_opaque(self) -> None:
        """Replace the opaque values that have changed since the last call; if it fails, the next call tries again."""
        began = time.perf_counter()
        for handle, block in zip(self._unread, self._reader.blocks(map(Wanted, self._unread)), strict=True):
            _apply(self._target, handle, block)
            self.live[handle] = -began + (began := time.perf_counter())
        self._unread = []

    def end(self, handles: Iterable[Handle]) -> None:
        """Forget what later checkpoints do not read."""
        for handle in handles:
            self.live.pop(handle, None)
        self._unread = [handle for handle in self._unread if handle in self.live]

    def name_damaged(self, error: StateError) -> str | None:
        """Return the object that an error names, if it is one that a restore reads."""
        return next((handle.object for handle in reversed(self.live) if handle.object in str(error)), None)


def check_indexes(store: Store, checks: Sequence[IndexCheck]) -> list[Failure]:
    """Check that the indexes of one operator's key groups agree with the manifests, and that each entry leads to the
    previous one."""
    failures: list[Failure] = []
    indexes: dict[int, list[IndexEntry]] = {}
    for check in checks:
        try:
            blocks = BlockReader(store, check.objects).blocks(map(Wanted, check.indexes))
            said = [e for h, block in zip(check.indexes, blocks, strict=True) for e in read_index(block, h.object)]
        except CorruptObject as error:
            failures += [Failure(c, str(error), check.indexes[0].object) for c in check.dependents]
            continue
        indexes[check.checkpoint] = said
        if differing := _name_differing(check, said):
            what = f"the index of checkpoint {check.checkpoint} and its manifest disagree about {differing}"
            failures += [Failure(c, what) for c in check.dependents]
    return failures or _broken_links(checks, indexes)


def _broken_links(checks: Sequence[IndexCheck], indexes: Mapping[int, Sequence[IndexEntry]]) -> list[Failure]:
    """Follow every chain back once, from its newest link; a chain may begin before a change of parallelism."""
    failures: list[Failure] = []
    seen: set[tuple[int, str]] = set()
    for check in reversed(checks):
        for variable in [e.variable for e in indexes[check.checkpoint] if (check.checkpoint, e.variable) not in seen]:
            try:
                links = follow(indexes.get, check.checkpoint, variable)
                seen |= {(link.checkpoint, variable) for link in links}
            except CorruptObject as error:
                failures += [Failure(c, str(error)) for c in check.dependents]
    return failures


def _name_differing(check: IndexCheck, said: Sequence[IndexEntry]) -> str:
    """Return the tables about which index and manifest disagree, including those missing from one of them.

    A manifest leaves out the changes of earlier steps that a base of the same checkpoint replaces.
    """
    named = {(h.variable, h.sqn): h for h in check.data if h.kind is Kind.INCREMENTAL}
    unsaid = named.keys() - {(e.variable, e.sqn) for e in said}
    kept = [e for e in said if (e.variable, e.sqn) in named or e.sqn >= check.bases.get(e.variable, 0)]
    wrong = {e.variable for e in kept if not _is_equal(e, named.get((e.variable, e.sqn)))}
    return ", ".join(sorted(wrong | {variable for variable, _ in unsaid}))


def _is_equal(entry: IndexEntry, handle: Handle | None) -> bool:
    return handle is not None and (
        (entry.form, entry.length, entry.rows, entry.checksum, entry.previous_checkpoint)
        == (handle.form, handle.length, handle.rows, handle.checksum, handle.previous)
    )


def check_objects(store: Store, objects: Sequence[tuple[StoredObject, Sequence[int]]]) -> list[Failure]:
    """Verify objects that no other check reads, each given with the checkpoints that are not proven without it."""
    failures = []
    for stored, dependents in objects:
        try:
            store.read(stored)
        except CorruptObject as error:
            failures += [Failure(checkpoint, str(error), stored.name) for checkpoint in dependents]
    return failures


def _follow_variables(target: MemoryState, names: Collection[str], schemas: Mapping[str, TableSchema]) -> None:
    """Let the target have a checkpoint's variables and no others: a chain may go on where one is dropped or added."""
    for gone in {*target.tables, *target.opaque}.difference(names):
        target.tables.pop(gone, None)
        target.opaque.pop(gone, None)
    added = {name: schemas[name] for name in names if name in schemas and name not in target.tables}
    target.tables |= MemoryState.make_empty(added, target.groups, target.max_parallelism).tables


def _apply(target: MemoryState, handle: Handle, block: Block) -> None:
    if handle.form is Form.BASE:
        _clear(target, handle)
    apply_handle(target, handle, [handle.key_groups], block)


def _apply_files(target: MemoryState, handles: Sequence[Handle], reader: BlockReader) -> None:
    """Let the tables of one step have the rows of its files, which are older than what else it has of them."""
    with FileSets(reader) as opened:
        for of in file_sets([Read(0, handle, ()) for handle in handles]).values():
            files = opened.open([read.handle for read in of])
            for handle in {read.handle.variable: read.handle for read in of}.values():
                _clear(target, handle)
                schema = target.tables[handle.variable].schema
                for rows, owners in files.rows(handle.variable, schema, handle.key_groups):
                    set_state(target, handle.variable, rows, owners)


def _clear(target: MemoryState, handle: Handle) -> None:
    """Delete the rows or values of a base's key groups: a base in the middle of a chain (one subtask fell back to it)
    replaces them."""
    values = target.opaque.get(handle.variable, {})
    for group in range(handle.key_groups.start, handle.key_groups.end) if values else ():
        values.pop(group, None)
    table = target.tables.get(handle.variable)
    if table is None or not table.rows:
        return
    for rows, key_groups in list(table.scan(handle.key_groups)):
        table.delete(key_batch(table.schema, rows, target.max_parallelism, key_groups))
