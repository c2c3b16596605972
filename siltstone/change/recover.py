"""Makes a damaged stream ready to run: rolls it back to the newest checkpoint that restores.

    1  find that checkpoint while a run may be at work (`change.recovery_point`); if nothing is damaged, or this is a
       dry run, no run is fenced
    2  refuse to give up what needs somebody's consent (`change.rollback_rules`)
    3  fence the run, find the checkpoint again, and act on this second result only
    4  if a materialized base is damaged and what it was made of is still there, make it again: nothing is given up
    5  give up the checkpoints above the one that restores, in one transaction (`catalog.rollbacks`); if none restores,
       all of them: the stream then starts from nothing, with its logged input
    6  drop damaged full snapshots: nothing can be compared with them, and no restore needs them
    7  if nothing is damaged, but the last run could not run a logged step again as it was, because its input has
       changed: give up the logged steps, if somebody accepts that sinks get rows again
    8  complete unfinished deletions, and sweep

A catalog restored from a backup does not know what newer runs have written (`catalog.epochs`). Recovery refuses it.
With `accept_loss` it continues under an epoch above theirs and gives up what the catalog does not know.

If the store or the catalog cannot be reached, nothing is known about any checkpoint, and nothing is given up. A store
is believed only while it shows the warehouse's identity: otherwise it may be another store, or one that reports
everything as missing. A recovery that is killed has rolled back or has not; the next recovery does the rest, and a run
can start in either case.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from siltstone.catalog.epochs import check_catalog, go_on_from_backup
from siltstone.catalog.extract_writer import try_write_extract, write_extract
from siltstone.catalog.records.rollbacks import RollbackLoss
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.recovery_point import (
    RecoveryPoint,
    describe_checkpoints,
    find_beside_run,
    find_recovery_point,
)
from siltstone.change.rollback_rules import explain_refusal
from siltstone.errors import CorruptObject, Fenced, LossRefused, UnknownCheckpoint, Unreachable
from siltstone.log import get_logger
from siltstone.restore.proof import Map
from siltstone.restore.verify import Failure, check_objects
from siltstone.result import Result
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease, this_process
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.run.step_digests import INPUT_CHANGED
from siltstone.run.take_over import find_next_damaged, take_over

_LOG = get_logger(__name__)
_AGAIN = "that sinks have the rows of logged steps only once"
OUTCOME = "recovered"
"""outcome that is recorded for the run of a recovery"""


@dataclass(frozen=True)
class Recovery(Result):
    """What a recovery did, or with `dry_run` would do.

    Attributes:
        checkpoint: the newest one after the recovery, from which the next run starts; 0 means from nothing.
        proven: whether it was proven; None if there is nothing to prove.
        given_up: the rolled-back checkpoints; those with logged input come again as the stream runs.
        failures: why: a checkpoint, a reason, and the damaged object, if there is one.
        rebuilt: operators whose damaged materialized base was made again. In a dry run, operators for which that would
            be tried first; `given_up` is then what would be given up if it did not help.
        fenced: whether the run at work, if there was one, was fenced: only if something was damaged.
        snapshots: the checkpoints whose full snapshots were damaged and dropped; the checkpoints themselves stay.
        savepoints: names that were lost with their checkpoints.
        edits: the checkpoints among `given_up` that held an edit by hand, which no input brings back.
        logged: the checkpoints among those given up before whose logged steps were given up, too, as their input has
            changed: what comes instead has new ids for sinks, which get rows that they have.
        refusal: in a dry run, why a recovery would need `accept_loss`; None if it would not.
        swept_objects: how many objects were deleted from the store, with `swept_bytes` bytes; none is of `given_up`.
    """

    stream: str
    dry_run: bool
    checkpoint: int
    proven: bool | None
    given_up: tuple[int, ...]
    failures: tuple[Failure, ...]
    rebuilt: tuple[str, ...]
    fenced: bool
    snapshots: tuple[int, ...]
    savepoints: tuple[str, ...]
    edits: tuple[int, ...]
    logged: tuple[int, ...]
    refusal: str | None
    swept_objects: int
    swept_bytes: int
    seconds: float

    @property
    def summary(self) -> str:
        """One line for people."""
        would, now = ("would give", "the next run would begin") if self.dry_run else ("gave", "the next run begins")
        done = f"{would} up {describe_checkpoints(self.given_up)}" if self.given_up else f"{would} nothing up"
        if self.rebuilt:
            done += f", {'would try to rebuild' if self.dry_run else 'rebuilt'} the base of {', '.join(self.rebuilt)}"
        done += f"; {now} {f'with checkpoint {self.checkpoint}' if self.checkpoint else 'from nothing'}"
        if self.snapshots:
            of = ", ".join(map(str, self.snapshots))
            done += f"; {'would drop' if self.dry_run else 'dropped'} the damaged snapshot of checkpoint {of}"
        if self.savepoints:
            done += f"; lost with them: savepoint {', '.join(self.savepoints)}"
        if self.edits:
            done += f"; edits at {', '.join(map(str, self.edits))} are lost: apply them again once the stream is there"
        if self.logged:
            of = describe_checkpoints(self.logged)
            done += f"; {would} up the logged steps of {of}, whose input has changed: sinks get rows of them again"
        if self.refusal:
            done += f"; --accept-loss is needed, since it would lose {self.refusal}"
        return done


def recover(
    warehouse: OpenWarehouse,
    stream: str,
    *,
    run: Map,
    dry_run: bool = False,
    accept_loss: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Recovery:
    """Make a stream ready to run from its newest checkpoint that restores.

    A run at work is fenced only if something is damaged.

    Args:
        run: maps the proofs over tasks.
        dry_run: only look; no run is fenced and nothing changes.
        accept_loss: give up whatever is necessary, savepoints and the whole stream too; only if a person asked for it.
        tell: called with what is found, line by line.

    Raises:
        UnknownStream: no such stream has run here.
        UnknownCheckpoint: it has no checkpoint yet, so there is nothing to recover.
        WrongWarehouse: the catalog is older than the store, and `accept_loss` is not set.
        LossRefused: what is damaged, even if the catalog does not have it yet, is not given up without `accept_loss`;
            nor are logged steps whose input has changed.
        Fenced: a run has taken the stream over meanwhile; nothing was given up.
        NewerFormat: a newer Siltstone wrote something that has to be proven; nothing was given up.
        Unreachable: the store or the catalog failed; nothing was given up.
    """
    start, catalog = time.perf_counter(), warehouse.catalog
    unfollowed = None if accept_loss and not dry_run else _find_unfollowed(warehouse, stream, dry_run)
    older = _check_catalog(warehouse, stream, dry_run, accept_loss, tell)
    # Before the epoch: a deletion that was planned without seeing this lease has an older epoch and is refused.
    with hold_lease(catalog, stream, None, what="recovers"):
        point, epoch = find_beside_run(warehouse, stream, run, tell), None
        lost = catalog.rollbacks.foresee(stream, point.checkpoint, point.newest)
        changed = () if point.failures else _find_changed(catalog, stream)
        refusals = unfollowed, _explain_refusal(point, lost), _AGAIN if changed else None
        if not dry_run:
            epoch, point, lost = _make_ready(warehouse, stream, run, tell, accept_loss, point, lost, changed)
        snapshots = _drop_snapshots(warehouse, stream, point.checkpoint, tell, dry_run=dry_run)
    swept = (0, 0) if dry_run else _clean(warehouse, stream, epoch)
    return Recovery(
        stream=stream,
        dry_run=dry_run,
        checkpoint=point.checkpoint,
        proven=True if point.checkpoint else None,
        given_up=lost.given_up,
        failures=point.failures,
        rebuilt=point.rebuilt,
        fenced=older or epoch is not None,
        snapshots=snapshots,
        savepoints=lost.savepoints,
        edits=lost.edits,
        logged=changed,
        refusal=", ".join(filter(None, refusals)) or None if dry_run else None,
        swept_objects=swept[0],
        swept_bytes=swept[1],
        seconds=round(time.perf_counter() - start, 3),
    )


def _make_ready(
    warehouse: OpenWarehouse,
    stream: str,
    run: Map,
    tell: Callable[[str], None],
    accept_loss: bool,
    point: RecoveryPoint,
    lost: RollbackLoss,
    changed: tuple[int, ...],
) -> tuple[int | None, RecoveryPoint, RollbackLoss]:
    """Give up what is damaged, or else the logged steps whose input has changed.

    Returns the epoch of that, None if nothing was given up, the point, and what was lost.

    Raises:
        LossRefused: it needs `accept_loss`.
    """
    if point.failures:
        if not point.rebuilt:
            _refuse_loss(stream, point, lost, accept_loss)
        return _roll_back(warehouse, stream, run, tell, accept_loss)
    if point.checkpoint:
        _note_proof(warehouse.catalog, stream, point.checkpoint)
    return _forget_logged(warehouse, stream, changed, accept_loss) if changed else None, point, lost


def _check_catalog(
    warehouse: OpenWarehouse, stream: str, dry_run: bool, accept_loss: bool, tell: Callable[[str], None]
) -> bool:
    """Make sure that the stream can be recovered by this catalog.

    Returns whether the catalog is older than the store and was taken above the store's epochs; that fences every run.

    Raises:
        UnknownStream, UnknownCheckpoint, WrongWarehouse, Unreachable: as `recover`.
    """
    warehouse.warehouse.store.check(writable=not dry_run)
    if accept_loss and not dry_run:
        damaged = find_next_damaged(warehouse, stream) is not None
        if go_on_from_backup(warehouse, stream, f"{this_process()} recovers", OUTCOME, older=damaged):
            tell("the catalog is older than the store: what it does not know of is given up")
            return True
    check_catalog(warehouse, stream)
    check_recoverable(warehouse.catalog, stream)
    return False


def _find_unfollowed(warehouse: OpenWarehouse, stream: str, dry_run: bool) -> str | None:
    """Say what the next run would have to follow in the store and cannot read; None if there is nothing.

    Raises:
        LossRefused: there is, and this is not a dry run.
    """
    damaged = find_next_damaged(warehouse, stream)
    if damaged is None:
        return None
    checkpoint, error = damaged
    lost = f"checkpoint {checkpoint} and what the store has after it, which the catalog does not have"
    if not dry_run:
        raise LossRefused(
            f"no run can take stream {stream} over: {error}. Going on without it would lose {lost}. Nothing was given "
            f"up: bring that object back, or accept the loss with `siltstone recover {stream} --accept-loss`"
        )
    return lost


def check_recoverable(catalog: Catalog, stream: str) -> None:
    """Make sure that a stream has completed a checkpoint, even if all of them have been given up since.

    Raises:
        UnknownStream, UnknownCheckpoint: as `recover`.
    """
    if not catalog.input_log.list_logged(stream) and not catalog.rollbacks.list(stream):
        catalog.checkpoints.get_latest(stream)


def _explain_refusal(point: RecoveryPoint, lost: RollbackLoss) -> str | None:
    """Why giving up `lost` needs `accept_loss`; None if it does not."""
    newest = max(lost.given_up, default=point.checkpoint)
    return explain_refusal(newest, point.checkpoint, lost.savepoints, lost.edits)


def _refuse_loss(stream: str, point: RecoveryPoint, lost: RollbackLoss, accept_loss: bool) -> None:
    """Make sure that what would be lost may be given up.

    Raises:
        LossRefused: it needs `accept_loss`.
    """
    refusal = _explain_refusal(point, lost)
    if accept_loss or refusal is None:
        return
    good = f"checkpoint {point.checkpoint}" if point.checkpoint else "none"
    why = f" ({point.failures[0].reason})" if point.failures else ""
    raise LossRefused(
        f"stream {stream} is damaged{why}; its newest checkpoint that restores is {good}, and going back would lose "
        f"{describe_checkpoints(lost.given_up)}: {refusal}. Nothing was given up: bring back what is missing, or "
        f"accept the loss with `siltstone recover {stream} --accept-loss`"
    )


def _roll_back(
    warehouse: OpenWarehouse, stream: str, run: Map, tell: Callable[[str], None], accept_loss: bool
) -> tuple[int, RecoveryPoint, RollbackLoss]:
    """Find the recovery point once more and roll back to it, under a writer epoch of its own that commits nothing.

    Returns that epoch, the point, and what was lost.
    """
    catalog = warehouse.catalog
    epoch = take_over(warehouse, stream, f"{this_process()} recovers")
    outcome = "failed"
    try:
        point = find_recovery_point(warehouse, stream, run, tell, rebuild=True)
        reason = point.failures[0].reason if point.failures else "nothing is damaged"
        if point.failures:
            warehouse.confirm_store()
        lost = catalog.rollbacks.roll_back(
            stream,
            epoch,
            point.checkpoint,
            reason,
            this_process(),
            lambda lost: _refuse_loss(stream, point, lost, accept_loss),
        )
        write_extract(warehouse, stream)
        if point.checkpoint:
            catalog.checkpoints.record_proof(stream, point.checkpoint, True)
        outcome = OUTCOME
    finally:
        with suppress(Unreachable):  # a note for people
            catalog.runs.end(stream, epoch, outcome)
    return epoch, point, lost


def _find_changed(catalog: Catalog, stream: str) -> tuple[int, ...]:
    """Return the checkpoints whose logged steps come next, if the last run since the newest rollback found that the
    input of one has changed."""
    logged = {step.checkpoint for step in catalog.input_log.list_logged(stream)}
    newest = max((rollback.epoch for rollback in catalog.rollbacks.list(stream)), default=0)
    runs = [run for run in catalog.runs.list(stream) if run.epoch > newest and run.outcome != OUTCOME] if logged else []
    return tuple(sorted(logged)) if runs and runs[-1].outcome == INPUT_CHANGED else ()


def _forget_logged(warehouse: OpenWarehouse, stream: str, changed: tuple[int, ...], accept_loss: bool) -> int:
    """Give up the logged steps, under a writer epoch of its own that commits nothing; return the epoch.

    Raises:
        LossRefused: that needs `accept_loss`.
    """
    of = describe_checkpoints(changed)
    if not accept_loss:
        raise LossRefused(
            f"stream {stream} is not damaged, but the logged steps of {of} cannot be run again: their input has "
            "changed. Giving them up would give sinks rows of theirs again, under new ids. Nothing was given up: bring "
            f"the input back, or accept that with `siltstone recover {stream} --accept-loss`"
        )
    catalog, who = warehouse.catalog, this_process()
    epoch = take_over(warehouse, stream, f"{who} recovers")
    try:
        catalog.rollbacks.forget_logged(stream, epoch, f"the input of the logged steps of {of} has changed", who)
        write_extract(warehouse, stream)
    finally:
        with suppress(Unreachable):  # a note for people
            catalog.runs.end(stream, epoch, OUTCOME)
    return epoch


def _note_proof(catalog: Catalog, stream: str, checkpoint: int) -> None:
    """Record that a checkpoint is proven, unless a run at work has just deleted it."""
    with suppress(UnknownCheckpoint):
        catalog.checkpoints.record_proof(
            stream, checkpoint, True, epoch=catalog.checkpoints.get(stream, checkpoint).epoch
        )


def _drop_snapshots(
    warehouse: OpenWarehouse, stream: str, checkpoint: int, tell: Callable[[str], None], *, dry_run: bool
) -> tuple[int, ...]:
    """Drop damaged full snapshots; returns their checkpoints, in a dry run those that would be dropped.

    Only snapshots of `checkpoint` and of checkpoints whose last proof failed are read.
    """
    catalog, epoch = warehouse.catalog, warehouse.catalog.streams.get(stream).epoch
    suspects = {checkpoint} | {c.id for c in catalog.checkpoints.list(stream) if c.proven is False}
    taken = [
        (o, [s.checkpoint])
        for s in catalog.reference_copies.list(stream)
        if s.checkpoint in suspects
        for o in s.objects
    ]
    for _ in range(2):  # a store may return wrong bytes once
        failures = check_objects(warehouse.warehouse.store, taken)
        taken = [(o, of) for o, of in taken if o.name in {failure.object for failure in failures}]
        if not taken:
            return ()
        warehouse.confirm_store()
    damaged = tuple(sorted({failure.checkpoint for failure in failures}))
    for failure in failures:
        tell(f"the snapshot of checkpoint {failure.checkpoint} is damaged: {failure.reason}")
    if not dry_run:
        try:
            for each in damaged:
                catalog.reference_copies.drop(stream, epoch, each)
            try_write_extract(warehouse, stream)
        except Fenced:  # somebody runs the stream now: it stays until the next recovery
            return ()
    return damaged


def _clean(warehouse: OpenWarehouse, stream: str, epoch: int | None) -> tuple[int, int]:
    """Complete deletions and sweep; return the number of deleted objects, and their bytes.

    The stream is ready without this, so a failure here is only logged. `epoch` is the rollback's; None means that
    nothing was rolled back, and that a run may be at work.
    """
    try:
        objects = size_bytes = 0
        if warehouse.catalog.checkpoints.last_id(stream):
            with suppress(Fenced):  # somebody runs it already
                deleted = delete_checkpoints(warehouse, stream, (), epoch=epoch)
                objects, size_bytes = deleted.objects, deleted.bytes
        swept = sweep(warehouse, stream, SweepOptions())
        return objects + swept.deleted, size_bytes + swept.bytes
    except (Unreachable, UnknownCheckpoint, CorruptObject) as error:
        _LOG.warning("stream is ready, but not all that is left over is swept", stream=stream, error=str(error))
        return 0, 0
