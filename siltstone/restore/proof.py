"""Prove several checkpoints of a stream together: each chain is walked once, in tasks that the caller maps."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, TypeAlias

from siltstone.catalog.records.chains import Chain
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, StateError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest, with_materializations
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.live_rules import LiveHandles
from siltstone.restore.plan_rules import VerifyChain, plan_proof
from siltstone.restore.verify import Failure, IndexCheck, ProofTask, check_indexes, prove
from siltstone.store.ahead import read_ahead

Map: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""maps a function over independent pieces"""


@dataclass(frozen=True)
class Proof:
    """The result of a proof: why checkpoints are not proven, and the cost of rebuilding each of the others.

    `restore_s` are the seconds of the slowest unit, which a restore takes with one core per unit; `restore_bytes` the
    bytes read.
    """

    failures: dict[int, Failure]
    restore_s: dict[int, float]
    restore_bytes: dict[int, int]


@dataclass(frozen=True)
class ProofPlan:
    """Independent tasks, and the failures found while planning."""

    tasks: list[ProofTask]
    indexes: list[list[IndexCheck]]
    failures: list[Failure] = field(default_factory=list)


def prove_checkpoints(warehouse: OpenWarehouse, stream: str, wanted: Sequence[int], run: Map) -> Proof:
    """Prove checkpoints; call it under a lease.

    Raises:
        UnknownCheckpoint: one of them does not exist, or no longer.
        Unreachable: the store or the catalog failed, which says nothing about any checkpoint.
    """
    store, local = warehouse.warehouse.store, warehouse.warehouse.local
    plan = plan_checkpoints(warehouse, stream, wanted)
    proofs = run(lambda task: prove(store, task, scratch=local.scratch()), plan.tasks)
    checked = run(lambda checks: check_indexes(store, checks), plan.indexes)
    failures = [*plan.failures, *(f for proof in proofs for f in proof.failures), *(f for fs in checked for f in fs)]
    asked = set(wanted)
    return Proof(
        failures={f.checkpoint: f for f in reversed(failures) if f.checkpoint in asked},
        restore_s={c: max((p.restore_s.get(c, 0.0) for p in proofs), default=0.0) for c in wanted},
        restore_bytes={c: sum(p.restore_bytes.get(c, 0) for p in proofs) for c in wanted},
    )


def plan_checkpoints(warehouse: OpenWarehouse, stream: str, wanted: Sequence[int]) -> ProofPlan:
    """Plan the proof of some checkpoints; call it under a lease.

    Raises:
        UnknownCheckpoint: one of them does not exist, or no longer.
    """
    store, chains = warehouse.warehouse.store, warehouse.catalog.chains.list_many(stream, wanted)

    def read_or_error(stored: StoredObject) -> Manifest | CorruptObject:
        try:
            return read_manifest(store, stored, stream)
        except CorruptObject as error:
            return error

    named = {stored.name: stored for chain in chains.values() for stored in chain.manifests}
    found = dict(zip(named, read_ahead(read_or_error, named.values()), strict=True))
    read = {name: each for name, each in found.items() if isinstance(each, Manifest)}
    broken = {name: each for name, each in found.items() if isinstance(each, CorruptObject)}
    bad = {c: next((s.name for s in chain.manifests if s.name in broken), None) for c, chain in chains.items()}
    failures = [Failure(c, str(broken[name]), name) for c, name in bad.items() if name is not None]
    planned = plan_chains({c: chains[c] for c, name in sorted(bad.items()) if name is None}, read)
    return ProofPlan(planned.tasks, planned.indexes, failures + planned.failures)


def plan_chains(chains: Mapping[int, Chain], read: Mapping[str, Manifest]) -> ProofPlan:
    """Plan the proof of checkpoints, ascending, each by what the catalog lists for it, as a restore of it would.

    All are planned together, unless one of them would then read what is not listed for it. So each half is planned by
    itself, and so on; a checkpoint that cannot even be planned alone fails.

    Args:
        read: name -> manifest, for all that the chains list.
    """
    try:
        return _plan_together(chains, read)
    except StateError as error:
        ids = list(chains)
        if len(ids) == 1:
            return ProofPlan([], [], [Failure(ids[0], str(error))])
    half = len(ids) // 2
    a, b = (plan_chains({c: chains[c] for c in some}, read) for some in (ids[:half], ids[half:]))
    return ProofPlan(a.tasks + b.tasks, a.indexes + b.indexes, a.failures + b.failures)


def _plan_together(chains: Mapping[int, Chain], read: Mapping[str, Manifest]) -> ProofPlan:
    """Plan the proof of checkpoints over all that is listed for any of them.

    Raises:
        StateError: one of them would read what is not listed for it, its chain has a gap, or its manifests have
            different key groups.
    """
    if not chains:
        return ProofPlan([], [])
    for c, chain in chains.items():
        own = (read[stored.name] for stored in chain.manifests)
        if not any(m.checkpoint == c and not m.materialization for m in own):
            raise _unlisted_error(c, "its manifest")
    listed = {stored.name: read[stored.name] for chain in chains.values() for stored in chain.manifests}
    known = {manifest.max_parallelism: manifest.checkpoint for manifest in listed.values()}
    if len(known) > 1:
        what = " and ".join(f"{key_groups} at checkpoint {at}" for key_groups, at in sorted(known.items()))
        raise StateError(f"its manifests do not have the same key groups: {what}", advice="restore another checkpoint")
    manifests = dict(sorted(with_materializations(list(listed.values())).items()))
    [max_parallelism] = known
    planned = plan_proof(_walk(chains, listed), max_parallelism, chains)
    part = cache(lambda checkpoint, operator: manifests[checkpoint].of_operator(operator))
    tasks = [
        ProofTask(chain, {s.checkpoint: part(s.checkpoint, chain.operator) for s in chain.steps}) for chain in planned
    ]
    return ProofPlan(tasks, _indexes(manifests, _dependents(planned)))


def _walk(chains: Mapping[int, Chain], listed: Mapping[str, Manifest]) -> Iterator[tuple[int, LiveHandles]]:
    """Yield the checkpoints of manifests, ascending, each with what a restore of it needs.

    Raises:
        StateError: one of `chains` needs an object that the catalog does not list for it.
    """
    live = LiveHandles()
    ordered = sorted(listed.items(), key=lambda each: (each[1].checkpoint, bool(each[1].materialization)))
    for checkpoint, written in groupby(ordered, key=lambda each: each[1].checkpoint):
        for name, manifest in written:
            live.apply(manifest, name)
        if checkpoint in chains and (unlisted := live.needed - chains[checkpoint].names):
            raise _unlisted_error(checkpoint, f"object {min(unlisted)}")
        yield checkpoint, live


_Segment = tuple[int, str, KeyGroupRange]
"""checkpoint, operator and key groups of a segment"""


def _indexes(manifests: Mapping[int, Manifest], dependents: Mapping[_Segment, Sequence[int]]) -> list[list[IndexCheck]]:
    """Return the indexes of the segments that checkpoints depend on, which no chain reads.

    There is one list per operator and key-group range, checkpoints ascending.
    """
    found: dict[tuple[str, KeyGroupRange], list[IndexCheck]] = {}
    for checkpoint, manifest in manifests.items():
        objects = {stored.name: stored for stored in manifest.objects}
        based = [h for h in manifest.handles if h.kind is Kind.INCREMENTAL and h.form is Form.BASE]
        by_writer: dict[tuple[str, KeyGroupRange], list[Handle]] = {}
        for handle in manifest.handles:
            by_writer.setdefault((handle.operator, handle.key_groups), []).append(handle)
        for (operator, groups), handles in by_writer.items():
            needing = dependents.get((checkpoint, operator, groups), [])
            indexes = [h for h in handles if h.kind is Kind.INDEX]
            if needing and indexes:  # materializations write none
                # Files are in no segment, so no index has them.
                data = [h for h in handles if h.kind is not Kind.INDEX and h.form is not Form.FILES]
                named = tuple(objects[name] for name in {h.object for h in indexes} if name in objects)
                bases = {h.variable: h.sqn for h in based if h.operator == operator and h.key_groups.intersect(groups)}
                check = IndexCheck(checkpoint, tuple(indexes), tuple(data), bases, named, tuple(needing))
                found.setdefault((operator, groups), []).append(check)
    return list(found.values())


def _dependents(planned: Sequence[VerifyChain]) -> dict[_Segment, list[int]]:
    """Return segment -> the proven checkpoints that need its tables, ascending."""
    found: dict[_Segment, list[int]] = {}
    for chain in planned:
        needed: dict[_Segment, int] = {}
        begun: dict[Handle, int] = {}
        for step in chain.steps:
            begun |= dict.fromkeys(step.handles, step.checkpoint)
            for handle in step.ends:
                if handle.kind is Kind.INCREMENTAL:
                    needed[begun[handle], chain.operator, handle.key_groups] = step.checkpoint
        proven = [step.checkpoint for step in chain.steps if step.proves]
        for segment, until in needed.items():
            found[segment] = proven[bisect_left(proven, segment[0]) : bisect_right(proven, until)]
    return found


def _unlisted_error(checkpoint: int, what: str) -> StateError:
    return StateError(
        f"checkpoint {checkpoint} needs {what}, but the catalog does not list it, so a deletion may take it",
        advice="restore another checkpoint, or rebuild the catalog (`siltstone rebuild-catalog`)",
    )
