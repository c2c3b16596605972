"""Proofs of recorded checkpoints without Spark: what `siltstone verify` and `restore` map over tasks, in a loop."""

from collections.abc import Sequence

from siltstone.catalog.place import Place
from siltstone.errors import ProofFailed
from siltstone.lifecycle.export import restore_unit, unit_tasks, whole_digest
from siltstone.lifecycle.restore import chain_manifests, read_manifests
from siltstone.lifecycle.verify import Failure, check_indexes, plan_proof, prove


def failures(place: Place, stream: str, wanted: Sequence[int] | None = None) -> list[Failure]:
    """Why these checkpoints (all, for None) are not proven; empty where all are."""
    catalog, store = place.catalog, place.warehouse.store
    chains = {c: catalog.chain(stream, c) for c in wanted or [c.id for c in catalog.checkpoints(stream)]}
    needed = sorted({c for chain in chains.values() for c in chain})
    stored = {c: catalog.checkpoint(stream, c).manifest for c in needed}
    materialized = {m.id: m for c in chains for m in catalog.chain_materializations(stream, c)}
    plan = plan_proof(store, stored, chains, [m.manifest for m in materialized.values() if m.manifest], stream)
    walked = [failure for task in plan.tasks for failure in prove(store, task).failures]
    checked = [failure for checks in plan.indexes for failure in check_indexes(store, checks)]
    return [*plan.failures, *walked, *checked]


def restored_digest(place: Place, stream: str, checkpoint: int, parallelism: int = 1) -> str:
    """The digest of what a restore of the checkpoint rebuilds.

    Raises:
        CorruptObject, ProofFailed: the chain is damaged.
    """
    catalog, store = place.catalog, place.warehouse.store
    manifests = read_manifests(store, chain_manifests(catalog, stream, checkpoint), stream)
    tasks, _ = unit_tasks(manifests, checkpoint, parallelism, None)
    digest = whole_digest([restore_unit(store, task) for task in tasks], manifests[checkpoint].max_parallelism)
    recorded = catalog.checkpoint(stream, checkpoint).digest
    if digest != recorded:
        raise ProofFailed(f"checkpoint {checkpoint} has digest {digest}, not the recorded {recorded}")
    return digest
