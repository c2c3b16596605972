"""Proves checkpoints: walks each chain once, reads each object once, compares every recorded digest on the way.

One task is one operator in one key-group range from a base on (`policy.restore_plan.verify_plan`). It keeps the state
in memory, applies checkpoint after checkpoint, and its digests, built from the rows that were read, must equal those
that the stream kept change by change (promise 1).
"""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, takewhile

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
from siltstone.state.protocol import key_batch
from siltstone.store.base import Store
from siltstone.store.paths import operator_of


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
    """Tasks that need nothing of each other, and what has failed already.

    `objects` are those that only have to be intact, each with the checkpoints that depend on it.
    """

    tasks: list[ProofTask]
    objects: list[tuple[StoredObject, list[int]]]
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
    part = cache(lambda checkpoint, operator: manifests[checkpoint].of_operator(operator))
    tasks = [
        ProofTask(chain, {s.checkpoint: part(s.checkpoint, chain.operator) for s in chain.steps})
        for chain in verify_plan(handles, newest.max_parallelism, provable)
    ]
    return ProofPlan(tasks, _unread(tasks, manifests, sorted(provable)), failures)


def _unread(
    tasks: Sequence[ProofTask], manifests: Mapping[int, Manifest], provable: Sequence[int]
) -> list[tuple[StoredObject, list[int]]]:
    """The objects that some of the `provable` depend on and no task reads, such as the index beside a base."""
    read = {h.object for task in tasks for step in task.chain.steps for h in step.handles}
    found = []
    for checkpoint, manifest in manifests.items():
        for stored in manifest.objects:
            if stored.name in read:
                continue
            operator = operator_of(stored.name)
            # Chains only ever begin later: those that reach back to this checkpoint follow each other.
            later = islice(provable, bisect_left(provable, checkpoint), None)
            reaching = takewhile(lambda c: manifests[c].first.get(operator, c) <= checkpoint, later)  # noqa: B023
            found.append((stored, list(reaching)))
    return [(stored, dependents) for stored, dependents in found if dependents]


@dataclass(frozen=True)
class ChainProof:
    """What walking one chain found; no failure means that every checkpoint it proves is proven.

    `restore_s` and `restore_bytes`: what it took to rebuild each proven checkpoint, from its base on.
    """

    failures: list[Failure]
    restore_s: dict[int, float]
    restore_bytes: dict[int, int]


def prove(store: Store, task: ProofTask) -> ChainProof:
    """Walk one chain."""
    start, read = time.perf_counter(), 0
    restore_s: dict[int, float] = {}
    restore_bytes: dict[int, int] = {}
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
                failures += [Failure(c, str(error), handle.object) for c in behind]
                return ChainProof(failures, restore_s, restore_bytes)
            read += handle.length
        if step.proves:
            try:
                check_digests(target, chain.operator, manifests[step.checkpoint])
                restore_s[step.checkpoint] = time.perf_counter() - start
                restore_bytes[step.checkpoint] = read
            except StateError as error:
                failures.append(Failure(step.checkpoint, str(error)))
    return ChainProof(failures, restore_s, restore_bytes)


def check_objects(store: Store, objects: Sequence[tuple[StoredObject, Sequence[int]]]) -> list[Failure]:
    """Verify objects that nothing else reads, each given with the checkpoints that are not proven without it."""
    failures = []
    for stored, dependents in objects:
        try:
            store.read(stored)
        except CorruptObject as error:
            failures += [Failure(checkpoint, str(error), stored.name) for checkpoint in dependents]
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
    for rows, key_groups in list(table.scan(handle.key_groups)):
        table.delete(key_batch(table.schema, rows, target.max_parallelism, key_groups))
