"""Deletes checkpoints and what only they refer to, so that a crash at any point leaves a deletion to be completed.

    1  one transaction marks them: from here on nobody sees them, and nobody begins to read them
    2  one transaction writes down what will be deleted (`catalog.tombstones`): not what another stream refers to, a
       fork of this one or the one it is a fork of, which is only let go of
    3  the store deletes the objects of those that no other checkpoint builds on; of those that wait for others, what no
       other ever reads: opaque variables, which every checkpoint holds whole, and snapshots. What somebody reads under
       a lease stays
    4  one transaction removes the rows of these objects and checkpoints
    5  one transaction removes the steps of the input log that no checkpoint that is left needs (`catalog.input_log`)

The catalog never refers to less than the store holds, and what is marked says what is left to do: the next deletion in
the stream, of these checkpoints again or of others, completes it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.leases import LeaseRecord
from siltstone.catalog.objects import ObjectKind, ObjectRecord
from siltstone.catalog.passes import Pass
from siltstone.catalog.repository import Catalog
from siltstone.catalog.tombstones import Tombstone
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.log import get_logger
from siltstone.result import Result
from siltstone.retention.deletion_rules import DeletionPlan, plan_deletion
from siltstone.retention.leases import this_process
from siltstone.store.paths import is_opaque

_LOG = get_logger(__name__)
REASON = "of a deleted checkpoint"
SUBSUMED = "of a checkpoint that retention does not keep"


@dataclass(frozen=True, slots=True)
class DeletionResult(Result):
    """What a deletion did.

    `deleted` checkpoints are gone, among them any that were marked before; `marked` are all that wait for others to be
    deleted, and `leased` for those who read them, marked or spared. `objects` were deleted from the store, of `bytes`
    together; those that another stream refers to are not among them. `left` could go, beyond the limit.
    """

    deleted: tuple[int, ...]
    marked: tuple[int, ...]
    objects: int
    bytes: int
    leased: tuple[int, ...] = ()
    left: int = 0


def delete_checkpoints(
    place: OpenWarehouse,
    stream: str,
    ids: Collection[int],
    *,
    epoch: int | None = None,
    who: str | None = None,
    reason: str = REASON,
    spare_leased: bool = False,
    limit: int | None = None,
    input_log: timedelta | None = None,
    restores_from: int | None = None,
) -> DeletionResult:
    """Delete checkpoints of a stream, and complete what earlier deletions left. Those gone already are no error.

    A run of the stream may be at work: it needs only what its newest checkpoint builds on, and that stays. No object is
    taken from whoever reads one of `ids` under a lease. Whoever chose `ids` by what it had read before passes the
    writer epoch of then.

    Args:
        spare_leased: leave those of `ids` alone that somebody reads; otherwise they are marked, too, and whoever has
            only just begun may not find them any more.
        who: what the records of the deletions say did it; this process, for None.
        reason: why, as they say.
        limit: how many checkpoints go now, at most; the others wait, marked, for the next deletion.
        input_log: also prune the input log of what no checkpoint that is left can be replayed with, except steps of
            this length of time; None leaves the log as it is.
        restores_from: the checkpoint from which on a step of a run at work may restore: the run that deletes passes
            it. A chain may have been materialized since the step began, so the catalog does not tell.

    Raises:
        UnknownStream: no such stream has run here.
        UnknownCheckpoint: the stream never had one of these; nothing is deleted.
        UsageError: the newest is among them, which the stream resumes from, or one that a savepoint keeps; nothing is
            deleted.
        WrongWarehouse: the catalog is older than the store; nothing is deleted.
        Fenced: a run has taken the stream over meanwhile; what is marked stays so, delete again.
        Unreachable: the store or the catalog failed; likewise.
    """
    catalog = place.catalog
    epoch = catalog.streams.get(stream).epoch if epoch is None else epoch
    catalog.checkpoints.latest(stream)  # or there is nothing to delete, and perhaps no epoch either
    check_catalog(place, stream)
    by = Pass.begin(reason, who or this_process())
    spared = catalog.deletions.mark(stream, epoch, ids, spare_leased=spare_leased, by=by)
    plan, objects = _plan(catalog, stream, (), catalog.leases.list_live(stream), limit, restores_from)
    doomed: list[Tombstone] = []
    goes = plan.goes[:limit]
    if goes or objects:
        doomed = [Tombstone(stored.name, stored.bytes, reason) for stored in objects]
        doomed = catalog.tombstones.record_deletion(stream, epoch, by.who, doomed, by)
        place.warehouse.store.delete([each.name for each in doomed])
        catalog.deletions.forget(stream, epoch, goes, [stored.name for stored in objects])
    if input_log is not None:
        pruned = catalog.input_log.prune(stream, epoch, keep=input_log, by=by)
        if pruned:
            _LOG.info("input log pruned", stream=stream, epoch=epoch, steps=pruned)
    leased = tuple(sorted({*plan.leased, *spared}))
    size_bytes, left = sum(each.bytes for each in doomed), len(plan.goes) - len(goes)
    return DeletionResult(goes, plan.waits, len(doomed), size_bytes, leased, left)


def foresee(catalog: Catalog, stream: str, ids: Collection[int] = ()) -> tuple[DeletionPlan, list[ObjectRecord]]:
    """What would go if `ids` were deleted beside those that are marked, and the objects that would go with it.

    Raises:
        UnknownStream: no such stream has run here.
    """
    plan, objects = _plan(catalog, stream, ids, catalog.references.view(stream, ()).leases)
    shared = catalog.references.find_shared(stream, [stored.name for stored in objects])
    return plan, [stored for stored in objects if stored.name not in shared]


def _plan(
    catalog: Catalog,
    stream: str,
    ids: Collection[int],
    leases: Sequence[LeaseRecord],
    limit: int | None = None,
    restores_from: int | None = None,
) -> tuple[DeletionPlan, list[ObjectRecord]]:
    def leased(checkpoint: int) -> bool:
        return any(lease.covers(checkpoint) for lease in leases)

    retained, wanted = catalog.checkpoints.list_retained(stream), set(ids)
    marked = {checkpoint.id for checkpoint in retained if checkpoint.deleted or checkpoint.id in wanted}
    first = {checkpoint.id: checkpoint.first for checkpoint in retained if checkpoint.id not in marked}
    if restores_from is not None and first:
        newest = max(first)
        first[newest] = min(first[newest], restores_from)
    plan = plan_deletion(first, marked, leased)
    unread = [checkpoint for checkpoint in plan.waits if not leased(checkpoint)]
    objects = catalog.objects.list(stream, plan.goes[:limit])
    objects += [stored for stored in catalog.objects.list(stream, unread) if _is_read_by_none_other(stored)]
    return plan, objects


def _is_read_by_none_other(stored: ObjectRecord) -> bool:
    return stored.kind is ObjectKind.REFERENCE_COPY or is_opaque(stored.name)
