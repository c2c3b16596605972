"""Proves checkpoints: walks each chain once, reads each object once, compares every recorded digest on the way.

One task is one operator in one key-group range from a base on (`policy.restore_plan.verify_plan`). It keeps the state
in memory, applies checkpoint after checkpoint, and its digests, built from the rows that were read, must equal those
that the stream kept change by change (promise 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from siltstone.catalog.manifest import Manifest
from siltstone.errors import CorruptObject, StateError
from siltstone.lifecycle.restore import (
    MemoryState,
    ObjectReader,
    apply_handle,
    check_digests,
    objects_of,
    read_manifests,
    schemas_of,
)
from siltstone.model import Form, Handle, Kind, StoredObject
from siltstone.policy.restore_plan import VerifyChain, verify_plan
from siltstone.state.backend import KeyBatch
from siltstone.state.hashing import xxhash64
from siltstone.store.base import Store


@dataclass(frozen=True)
class Failure:
    """Why a checkpoint is not proven; `object` is the damaged object, where there is one."""

    checkpoint: int
    reason: str
    object: str | None = None


@dataclass(frozen=True)
class ProofTask:
    """One chain, and what is needed to prove it: the manifests that it runs through."""

    chain: VerifyChain
    manifests: Mapping[int, Manifest]


@dataclass(frozen=True)
class ProofPlan:
    """Tasks that need nothing of each other, objects that only have to be intact, and what has failed already."""

    tasks: list[ProofTask]
    objects: list[tuple[int, StoredObject]]
    failures: list[Failure] = field(default_factory=list)


def plan_proof(store: Store, stored: Mapping[int, StoredObject], chains: Mapping[int, Sequence[int]]) -> ProofPlan:
    """Plan the proof of some checkpoints.

    Args:
        stored: the manifest object of every checkpoint that is needed.
        chains: the checkpoints to prove -> those that each of them is restored from, itself included.
    """
    manifests: dict[int, Manifest] = {}
    broken: dict[int, CorruptObject] = {}
    for checkpoint, manifest in stored.items():
        try:
            manifests |= read_manifests(store, [manifest])
        except CorruptObject as error:
            broken[checkpoint] = error
    failures, provable = [], []
    for checkpoint, chain in chains.items():
        bad = [c for c in chain if c in broken]
        if bad:
            failures.append(Failure(checkpoint, str(broken[bad[0]]), stored[bad[0]].name))
        else:
            provable.append(checkpoint)
    needed = {c for checkpoint in provable for c in chains[checkpoint]}
    manifests = {c: m for c, m in sorted(manifests.items()) if c in needed}
    if not manifests:
        return ProofPlan([], [], failures)
    handles = {c: m.handles for c, m in manifests.items()}
    newest = manifests[max(manifests)]
    tasks = [
        ProofTask(chain, {s.checkpoint: manifests[s.checkpoint].of_operator(chain.operator) for s in chain.steps})
        for chain in verify_plan(handles, newest.max_parallelism, provable)
    ]
    used = {h.object for m in manifests.values() for h in m.handles}
    unused = [(c, o) for c, m in manifests.items() for o in m.objects if o.name not in used]
    return ProofPlan(tasks, unused, failures)


def prove(store: Store, task: ProofTask) -> list[Failure]:
    """Walk one chain; an empty answer means that every checkpoint it proves is proven."""
    chain, manifests = task.chain, task.manifests
    last = manifests[chain.steps[-1].checkpoint]
    target = MemoryState.empty(schemas_of(last, chain.operator), chain.key_groups, last.max_parallelism)
    failures: list[Failure] = []
    for position, step in enumerate(chain.steps):
        # A reader a step: no object belongs to two checkpoints, and memory stays bounded by one checkpoint's.
        reader = ObjectReader(store, objects_of({step.checkpoint: manifests[step.checkpoint]}))
        for handle in step.handles:
            try:
                _apply(target, handle, reader)
            except CorruptObject as error:
                behind = [s.checkpoint for s in chain.steps[position:] if s.proves]
                return failures + [Failure(c, str(error), handle.object) for c in behind]
        if step.proves:
            try:
                check_digests(target, chain.operator, manifests[step.checkpoint])
            except StateError as error:
                failures.append(Failure(step.checkpoint, str(error)))
    return failures


def check_objects(store: Store, objects: Sequence[tuple[int, StoredObject]]) -> list[Failure]:
    """Verify objects that no handle points at, such as the index of a checkpoint in base form."""
    failures = []
    for checkpoint, stored in objects:
        try:
            store.read(stored)
        except CorruptObject as error:
            failures.append(Failure(checkpoint, str(error), stored.name))
    return failures


def _apply(target: MemoryState, handle: Handle, reader: ObjectReader) -> None:
    if handle.kind is Kind.INCREMENTAL and handle.form is Form.BASE:
        _clear(target, handle)
    apply_handle(target, handle, [handle.key_groups], reader.block(handle))


def _clear(target: MemoryState, handle: Handle) -> None:
    """A base in the middle of a chain (one subtask fell back to it) replaces whatever its key groups held."""
    table = target.tables.get(handle.variable)
    if table is None or not table.rows:
        return
    for rows, key_groups in table.scan(handle.key_groups):
        keys = rows.select(table.schema.primary_key.names)
        hashes = xxhash64(keys.select(table.schema.key.names).columns)
        if table.schema.subkey.names:
            hashes = xxhash64(keys.select(table.schema.subkey.names).columns, hashes)
        table.delete(KeyBatch(keys, hashes, key_groups))
