"""Proofs of recorded checkpoints without Spark: what `siltstone verify` and `restore` map over tasks, in a loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import ProofFailed
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifests
from siltstone.restore.export import restore_unit, unit_tasks, whole_digest
from siltstone.restore.proof import prove_checkpoints
from siltstone.restore.verify import Failure
from tests.examples import is_thorough, some
from tests.stored import stream_objects
from tests.sums import NAME


def in_order(function: Callable[[Any], Any], pieces: Iterable[Any]) -> list[Any]:
    """What maps over tasks, without Spark: one after the other."""
    return [function(piece) for piece in pieces]


def failures(place: OpenWarehouse, stream: str, wanted: Sequence[int] | None = None) -> list[Failure]:
    """Why these checkpoints (all, for None) are not proven, one reason each; empty where all are."""
    ids = wanted or [c.id for c in place.catalog.checkpoints.list(stream)]
    proof = prove_checkpoints(place, stream, ids, in_order)
    return [proof.failures[c] for c in sorted(proof.failures)]


def rebuilt_digest(
    place: OpenWarehouse, manifests: Mapping[int, Manifest], checkpoint: int, parallelism: int = 1
) -> str:
    """The digest of what a restore rebuilds that has read the manifests of the checkpoint's chain."""
    store = place.warehouse.store
    tasks, _ = unit_tasks(manifests, checkpoint, parallelism, None)
    return whole_digest([restore_unit(store, task) for task in tasks], manifests[checkpoint].max_parallelism)


def restored_digest(place: OpenWarehouse, stream: str, checkpoint: int, parallelism: int = 1) -> str:
    """The digest of what a restore of the checkpoint rebuilds.

    Raises:
        CorruptObject, ProofFailed: the chain is damaged.
    """
    catalog, store = place.catalog, place.warehouse.store
    manifests = read_manifests(store, catalog.chains.list_manifests(stream, checkpoint), stream)
    digest = rebuilt_digest(place, manifests, checkpoint, parallelism)
    recorded = catalog.checkpoints.get(stream, checkpoint).digest
    if digest != recorded:
        raise ProofFailed(f"checkpoint {checkpoint} has digest {digest}, not the recorded {recorded}")
    return digest


def check_restores(place: OpenWarehouse, stream: str, parallelisms: Sequence[int] = (1,)) -> None:
    """All checkpoints of a stream prove, and some restore, each at one of the parallelisms; in `make test-thorough` all
    at each."""
    assert not failures(place, stream)
    for turn, record in enumerate(some(place.catalog.checkpoints.list(stream))):
        for parallelism in parallelisms if is_thorough() else [parallelisms[turn % len(parallelisms)]]:
            assert restored_digest(place, stream, record.id, parallelism) == record.digest


def check_whole(place: OpenWarehouse, visible: Iterable[int]) -> None:
    """Exactly these checkpoints of the stream of sums are to be seen, and prove; the store holds exactly what the
    catalog names."""
    recorded = place.catalog.checkpoints.list(NAME)
    assert [c.id for c in recorded] == sorted(visible)
    check_restores(place, NAME)
    named = [(o.name, o.bytes) for o in place.catalog.objects.list(NAME)]
    assert sorted(stream_objects(place.warehouse.store)) == sorted(named)
