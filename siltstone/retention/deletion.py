"""Delete checkpoints and what only they refer to; a crash at any point leaves a deletion that can be completed.

    1  one transaction marks them: from here on they are invisible, and no reader can begin to read them
    2  one transaction records tombstones for the objects to delete (`catalog.tombstones`); objects that another stream
       refers to (a fork, or the stream that this one was forked from) are only released, not deleted
    3  the store deletes the objects that no remaining checkpoint needs (`deletion_rules`). Objects read under a lease
       stay
    4  one transaction removes the rows of these objects and checkpoints
    5  one transaction removes the steps of the input log that no remaining checkpoint needs (`catalog.input_log`)

The catalog refers to every object that may still be in the store, and the marks show what is left to do: the stream's
next deletion, of these checkpoints or of others, completes it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.records.leases import LeaseRecord
from siltstone.catalog.records.objects import ObjectRecord
from siltstone.catalog.records.passes import Pass
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.result import Result
from siltstone.retention.deletion_rules import DeletionPlan, plan_deletion
from siltstone.retention.leases import this_process

_LOG = get_logger(__name__)
REASON = "of a deleted checkpoint"
SUBSUMED = "of a checkpoint that retention does not keep"


@dataclass(frozen=True, slots=True)
class DeletionResult(Result):
    """What a deletion did.

    `deleted` checkpoints are gone, including any that were marked before. `marked` checkpoints wait until others that
    need one of their objects are deleted, the last of them in `needed_by`; `leased` ones until their readers end,
    marked or spared. `objects` of `bytes` in total were deleted from the store, without those that another stream
    refers to. `left` more could go, beyond the limit.
    """

    deleted: tuple[int, ...]
    marked: tuple[int, ...]
    objects: int
    bytes: int
    leased: tuple[int, ...] = ()
    left: int = 0
    needed_by: Mapping[int, int] = field(default_factory=dict)


def delete_checkpoints(
    warehouse: OpenWarehouse,
    stream: str,
    ids: Collection[int],
    *,
    epoch: int | None = None,
    who: str | None = None,
    reason: str = REASON,
    spare_leased: bool = False,
    limit: int | None = None,
    input_log: timedelta | None = None,
    steps_ended: bool = False,
) -> DeletionResult:
    """Delete checkpoints of a stream, and complete earlier deletions. Checkpoints that are already gone are no error.

    The stream may be running: a run needs only what its newest checkpoint builds on, or built on when its current step
    began, and that stays. Objects that a reader of one of `ids` has leased are not deleted.

    Args:
        epoch: the writer epoch under which `ids` were chosen, if the choice depends on what was read then; default the
            current one.
        spare_leased: leave leased checkpoints in `ids` alone; otherwise they are marked, too, and a reader that has
            only just begun may miss them.
        who: recorded as the author of the deletions; default this process.
        reason: recorded as the reason.
        limit: maximum checkpoints to delete now; the others wait, marked, for the next deletion.
        input_log: also prune steps of the input log that no remaining checkpoint needs for a replay, except those of
            this length of time; None leaves the log alone.

        steps_ended: the caller is the stream's run, and begins no further step.

    Raises:
        UnknownStream: the stream has not run here.
        UnknownCheckpoint: the stream never had one of these; nothing is deleted.
        UsageError: they include the newest, from which the stream resumes, or one with a savepoint; nothing is deleted.
        WrongWarehouse: the catalog is older than the store; nothing is deleted.
        Fenced: a run has taken the stream over meanwhile; marked checkpoints stay marked, delete again.
        Unreachable: the store or the catalog failed; likewise.
    """
    catalog = warehouse.catalog
    epoch = catalog.streams.get(stream).epoch if epoch is None else epoch
    catalog.checkpoints.get_latest(stream)  # raises if there is nothing to delete; there may be no epoch then
    check_catalog(warehouse, stream)
    by = Pass.begin(reason, who or this_process())
    spared = catalog.deletions.mark(stream, epoch, ids, spare_leased=spare_leased, by=by)
    plan = _plan(catalog, stream, (), lambda: catalog.leases.list_live(stream), steps_ended)
    goes = plan.goes[:limit]
    later = set(plan.goes[len(goes) :])
    objects = [stored for stored in plan.objects if stored.checkpoint not in later]
    tombstones = _remove(warehouse, stream, epoch, goes, objects, by) if goes or objects else []
    if ids and not goes and not objects:
        write_extract(warehouse, stream)
    if input_log is not None:
        pruned = catalog.input_log.prune(stream, epoch, keep=input_log, by=by)
        if pruned:
            _LOG.debug("input log pruned", stream=stream, epoch=epoch, steps=pruned)
    size_bytes, leased = sum(each.bytes for each in tombstones), tuple(sorted({*plan.leased, *spared}))
    return DeletionResult(goes, plan.waits, len(tombstones), size_bytes, leased, len(later), plan.needed_by)


def _remove(
    warehouse: OpenWarehouse, stream: str, epoch: int, goes: Sequence[int], objects: Sequence[ObjectRecord], by: Pass
) -> list[Tombstone]:
    """Delete objects, and the rows of checkpoints; return the tombstones of what was deleted from the store."""
    catalog = warehouse.catalog
    tombstones = [Tombstone(stored.name, stored.bytes, by.what) for stored in objects]
    tombstones = catalog.tombstones.record_deletion(stream, epoch, by.who, tombstones, by)
    # Before anything is gone, the store must say that it is going, for a catalog that is rebuilt from it.
    extract = write_extract(warehouse, stream)
    visible = {id for each in extract.retained if not each.marked for id in range(each.first, each.last + 1)}
    if not visible.isdisjoint(goes):
        raise Unreachable(f"the catalog {catalog.url} has lost what it recorded of the deletion: delete again")
    warehouse.warehouse.store.delete([each.name for each in tombstones])
    catalog.deletions.forget(stream, epoch, goes, [stored.name for stored in objects])
    return tombstones


def foresee(catalog: Catalog, stream: str, ids: Collection[int] = ()) -> DeletionPlan:
    """Return what deleting `ids`, besides the marked checkpoints, would do, without objects that are shared.

    Raises:
        UnknownStream: the stream has not run here.
    """
    plan = _plan(catalog, stream, ids, lambda: catalog.references.view(stream, ()).leases)
    shared = catalog.references.find_shared(stream, [stored.name for stored in plan.objects])
    return replace(plan, objects=tuple(stored for stored in plan.objects if stored.name not in shared))


def _plan(
    catalog: Catalog,
    stream: str,
    ids: Collection[int],
    read_leases: Callable[[], Sequence[LeaseRecord]],
    steps_ended: bool = False,
) -> DeletionPlan:
    wanted = set(ids)
    retained = {c.id: c.deleted or c.id in wanted for c in catalog.checkpoints.list_retained(stream)}
    marked = [id for id, deleted in retained.items() if deleted]
    objects = catalog.objects.list(stream, marked)
    # These last: who reads what was materialized before the objects were read has taken its lease, or begun its run,
    # before that.
    leases, running = read_leases(), not steps_ended and catalog.runs.is_open(stream)
    return plan_deletion(
        objects,
        [id for id, deleted in retained.items() if not deleted],
        marked,
        lambda checkpoint: any(lease.covers(checkpoint) for lease in leases),
        running,
    )
