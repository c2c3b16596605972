"""Makes a stream ready again after something of it was damaged: goes back to the newest checkpoint that restores.

    1  look, while a run may be at work: prove the newest checkpoint, and if it fails older ones, twice as many at a
       time, until one holds. What fails is looked at twice, since a store may return wrong bytes once. If all is well,
       or this is a dry run, no run is fenced
    2  refuse what may not be given up without being asked (`change.rollback_rules`)
    3  fence: no run commits any more; then look again, and act on that second look only
    4  if a materialized base is damaged, and what it was made of is there still: make it again, which gives nothing up
    5  give up what lies above the checkpoint that holds, in one transaction (`catalog.rollbacks`); without any that
       holds, everything: the stream then begins from nothing, with its logged input
    6  drop full snapshots that are damaged: they compare with nothing any more, and no restore needs them
    7  complete deletions that were under way, and sweep

A catalog that was restored from a backup does not know what newer runs have written (`catalog.epochs`). It is
refused, or, with the loss accepted, gone on from under an epoch above theirs; what it does not know of is given up.

A store or catalog that cannot be reached says nothing about any checkpoint: then nothing is given up. Nor is a store
believed that does not show the warehouse's identity at that very moment: it may be another one, or say of everything
that it is not there. Killed anywhere, it has either rolled back or not; recovering again does the rest, and a run goes
on from there in any case.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from siltstone.catalog.epochs import begin_epoch, check_catalog, go_on_from_backup
from siltstone.catalog.repository import Catalog
from siltstone.catalog.rollbacks import RollbackLoss
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.rollback_rules import explain_refusal
from siltstone.errors import (
    CorruptObject,
    Fenced,
    LossRefused,
    NewerFormat,
    StateError,
    UnknownCheckpoint,
    Unreachable,
    UsageError,
)
from siltstone.log import get_logger
from siltstone.restore.proof import Map, prove_checkpoints
from siltstone.restore.verify import Failure, check_objects
from siltstone.result import Result
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease, this_process
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.run.outbox import damaged_output
from siltstone.store.paths import materialization_of

_LOG = get_logger(__name__)
OUTCOME = "recovered"
"""how the run of a recovery ends"""
_LOOKS = 5
"""how often a stream is looked at that changes meanwhile"""


@dataclass(frozen=True)
class Recovery(Result):
    """What a recovery did, or with `dry_run` would do.

    Attributes:
        checkpoint: the newest one from now on, which the next run begins with; 0 is from nothing.
        proven: whether it was proven; None where there is nothing to prove.
        given_up: the checkpoints that are no more; those of the input log come again as the stream runs on.
        failures: why: a checkpoint, a reason, and the damaged object, where there is one.
        rebuilt: operators whose materialized base was damaged and was made again; in a dry run, those for which that
            would be tried first, and `given_up` is what would be given up if it did not help.
        fenced: whether the run at work, if there was one, was fenced: only where something was damaged.
        snapshots: the checkpoints whose full snapshots were damaged and dropped; the checkpoints themselves stay.
        savepoints: names that went with their checkpoints.
        edits: the checkpoints among `given_up` that held an edit by hand, which no input brings back.
        refusal: of a dry run, why this is not done without `accept_loss`; None if it is.
        swept_objects: what was deleted from the store, of `swept_bytes` together: never anything of `given_up`.
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
    refusal: str | None
    swept_objects: int
    swept_bytes: int
    seconds: float

    @property
    def summary(self) -> str:
        """One line for people."""
        would, now = ("would give", "the next run would begin") if self.dry_run else ("gave", "the next run begins")
        done = f"{would} up {span(self.given_up)}" if self.given_up else f"{would} nothing up"
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
        if self.refusal:
            done += f"; --accept-loss is needed, since it would lose {self.refusal}"
        return done


@dataclass(frozen=True)
class _Choice:
    """The checkpoint to go on from, of those up to `newest`, and why those above it do not hold."""

    checkpoint: int
    newest: int
    failures: tuple[Failure, ...] = ()
    rebuilt: tuple[str, ...] = ()


def recover(
    place: OpenWarehouse,
    stream: str,
    *,
    run: Map,
    dry_run: bool = False,
    accept_loss: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Recovery:
    """Leave a stream ready to run on from its newest checkpoint that restores.

    The run at work, if any, is fenced only where something is damaged.

    Args:
        run: maps the proofs over tasks.
        dry_run: only look; no run is fenced and nothing changes.
        accept_loss: give up whatever has to be, savepoints and the whole stream too. Only for people who said so.
        tell: told what is found, line by line.

    Raises:
        UnknownStream: no such stream has run here.
        UnknownCheckpoint: it has no checkpoint yet, so there is nothing to recover.
        WrongWarehouse: the catalog is older than the store, and `accept_loss` was not said.
        LossRefused: more would be given up than may be without `accept_loss`; nothing was.
        Fenced: a run has taken the stream over meanwhile; nothing was given up.
        NewerFormat: a newer Siltstone wrote what is to be proven; nothing was given up.
        Unreachable: the store or the catalog failed; nothing was given up.
    """
    start = time.perf_counter()
    catalog = place.catalog
    place.warehouse.store.check(writable=not dry_run)
    older = accept_loss and not dry_run and go_on_from_backup(place, stream, f"{this_process()} recovers", OUTCOME)
    if older:
        tell("the catalog is older than the store: what it does not know of is given up")
    else:
        check_catalog(place, stream)
        check_recoverable(catalog, stream)
    # Before the epoch: a deletion that was planned without seeing the lease is of an older epoch, and refused.
    with hold_lease(catalog, stream, None, what="recovers"):
        choice, epoch = _look(place, stream, run, tell), None
        lost = catalog.rollbacks.foresee(stream, choice.checkpoint, choice.newest)
        if choice.failures and not dry_run:
            if not choice.rebuilt:
                _refuse_loss(stream, choice, lost, accept_loss)
            epoch, choice, lost = _roll_back(place, stream, run, tell, accept_loss)
        elif choice.checkpoint and not dry_run:
            _note_proof(catalog, stream, choice.checkpoint)
        snapshots = _drop_snapshots(place, stream, choice.checkpoint, tell, dry_run=dry_run)
    swept = (0, 0) if dry_run else _clean(place, stream, epoch)
    return Recovery(
        stream=stream,
        dry_run=dry_run,
        checkpoint=choice.checkpoint,
        proven=True if choice.checkpoint else None,
        given_up=lost.given_up,
        failures=choice.failures,
        rebuilt=choice.rebuilt,
        fenced=older or epoch is not None,
        snapshots=snapshots,
        savepoints=lost.savepoints,
        edits=lost.edits,
        refusal=_refusal(choice, lost) if dry_run else None,
        swept_objects=swept[0],
        swept_bytes=swept[1],
        seconds=round(time.perf_counter() - start, 3),
    )


def check_recoverable(catalog: Catalog, stream: str) -> None:
    """A stream that has completed something, even if all of it was given up, to come again or for good.

    Raises:
        UnknownStream, UnknownCheckpoint: as `recover`.
    """
    if not catalog.input_log.list_logged(stream) and not catalog.rollbacks.list(stream):
        catalog.checkpoints.latest(stream)


def _look(place: OpenWarehouse, stream: str, run: Map, tell: Callable[[str], None]) -> _Choice:
    """Choose while a run may be at work, whose retention, recovery or deletions change what there is meanwhile: a
    checkpoint that is not there any more is no damaged one."""
    for _ in range(_LOOKS):
        before = {c.id: c.epoch for c in place.catalog.checkpoints.list(stream)}
        with suppress(UnknownCheckpoint):
            choice = _choose(place, stream, run, tell, rebuild=False)
            now = {c.id: c.epoch for c in place.catalog.checkpoints.list(stream)}
            if all(now.get(f.checkpoint) == before.get(f.checkpoint) for f in choice.failures):
                return choice
    raise Unreachable(f"stream {stream} changes while it is looked at: recover it again", transient=True)


def _refusal(choice: _Choice, lost: RollbackLoss) -> str | None:
    newest = max(lost.given_up, default=choice.checkpoint)
    return explain_refusal(newest, choice.checkpoint, lost.savepoints, lost.edits)


def _refuse_loss(stream: str, choice: _Choice, lost: RollbackLoss, accept_loss: bool) -> None:
    """Refuse to give up what may not be without being asked.

    Raises:
        LossRefused
    """
    refusal = _refusal(choice, lost)
    if accept_loss or refusal is None:
        return
    good = f"checkpoint {choice.checkpoint}" if choice.checkpoint else "none"
    why = f" ({choice.failures[0].reason})" if choice.failures else ""
    raise LossRefused(
        f"stream {stream} is damaged{why}; its newest checkpoint that restores is {good}, and going back would lose "
        f"{span(lost.given_up)}: {refusal}. Nothing was given up: bring back what is missing, or accept the loss with "
        f"`siltstone recover {stream} --accept-loss`"
    )


def _roll_back(
    place: OpenWarehouse, stream: str, run: Map, tell: Callable[[str], None], accept_loss: bool
) -> tuple[int, _Choice, RollbackLoss]:
    """Under a writer epoch of its own, which commits nothing."""
    catalog = place.catalog
    epoch = begin_epoch(place, stream, f"{this_process()} recovers")
    outcome = "failed"
    try:
        choice = _choose(place, stream, run, tell, rebuild=True)
        reason = choice.failures[0].reason if choice.failures else "nothing is damaged"
        if choice.failures:
            place.confirm_store()
        lost = catalog.rollbacks.roll_back(
            stream,
            epoch,
            choice.checkpoint,
            reason,
            this_process(),
            lambda lost: _refuse_loss(stream, choice, lost, accept_loss),
        )
        if choice.checkpoint:
            catalog.checkpoints.record_proof(stream, choice.checkpoint, True)
        outcome = OUTCOME
    finally:
        with suppress(Unreachable):  # a note for people
            catalog.runs.end(stream, epoch, outcome)
    return epoch, choice, lost


def _note_proof(catalog: Catalog, stream: str, checkpoint: int) -> None:
    """Of a checkpoint that a run at work may just have deleted."""
    with suppress(UnknownCheckpoint):
        catalog.checkpoints.record_proof(
            stream, checkpoint, True, epoch=catalog.checkpoints.get(stream, checkpoint).epoch
        )


def _choose(place: OpenWarehouse, stream: str, run: Map, tell: Callable[[str], None], *, rebuild: bool) -> _Choice:
    """The newest checkpoint that is proven, and why those above it are not."""
    waiting = [c.id for c in place.catalog.checkpoints.list(stream)][::-1]
    newest = max(waiting, default=0)
    failed = _output_failures(place, stream, waiting, tell)
    waiting = waiting[len(failed) :]
    rebuilt: tuple[str, ...] = ()
    at_once = 1
    while waiting:
        some, waiting = waiting[:at_once], waiting[at_once:]
        tell(f"proving {span(some)}")
        failures = _failures(place, stream, some, run)
        if failures and at_once == 1:
            damaged = _damaged_bases(place, stream, failures[some[0]])
            rebuilt = _rebuild(place, stream, damaged, run, tell) if rebuild else damaged
            if rebuild and rebuilt:
                failures = _failures(place, stream, some, run)
        for failure in failures.values():
            tell(f"checkpoint {failure.checkpoint} cannot be restored: {failure.reason}")
        good = next((c for c in some if c not in failures), 0)
        failed += [failures[c] for c in some if c > good]
        if good:
            return _Choice(good, newest, tuple(failed), rebuilt)
        at_once *= 2
    return _Choice(0, newest, tuple(failed), rebuilt)


def _output_failures(
    place: OpenWarehouse, stream: str, newest_first: list[int], tell: Callable[[str], None]
) -> list[Failure]:
    """Checkpoints to go back behind, since what a sink is to have of the first of them is damaged: made again, of the
    same input, it is staged again."""
    damaged = damaged_output(place.warehouse.store, place.catalog, stream)
    if damaged is None:
        return []
    place.confirm_store()
    first, error = damaged
    tell(f"the output of checkpoint {first} cannot be delivered: {error}")
    return [Failure(c, str(error)) for c in newest_first if c >= first]


def _failures(place: OpenWarehouse, stream: str, some: list[int], run: Map) -> dict[int, Failure]:
    """Why checkpoints are not proven, at a second look either, by a store that shows what must be there."""
    failures = prove_checkpoints(place, stream, some, run).failures
    if failures:
        place.confirm_store()
        failures = prove_checkpoints(place, stream, sorted(failures), run).failures
    if failures:
        place.confirm_store()
    return failures


def _damaged_bases(place: OpenWarehouse, stream: str, failure: Failure) -> tuple[str, ...]:
    """The operators whose chain begins with the materialization that a damaged object is of."""
    id = materialization_of(failure.object or "")
    begins = place.catalog.materializations.list_in_chain(stream, failure.checkpoint) if id else []
    return tuple(m.operator for m in begins if m.id == id)


def _rebuild(
    place: OpenWarehouse, stream: str, operators: tuple[str, ...], run: Map, tell: Callable[[str], None]
) -> tuple[str, ...]:
    """Materialize once more, at the same checkpoint, what these operators' chains begin with; those that could be."""
    done = []
    for m in place.catalog.materializations.list_in_chain(stream, place.catalog.checkpoints.last_id(stream)):
        if m.operator in operators:
            tell(f"rebuilding the base of {m.operator} at checkpoint {m.checkpoint}")
            try:
                id = uuid.uuid4().hex
                materialize(place, stream, m.operator, m.checkpoint, id=id, parallelism=1, run=run, again=True)
                done.append(m.operator)
            except NewerFormat:
                raise
            except (StateError, UsageError):  # what it was made of is damaged too, or gone
                continue
    return tuple(done)


def _drop_snapshots(
    place: OpenWarehouse, stream: str, checkpoint: int, tell: Callable[[str], None], *, dry_run: bool
) -> tuple[int, ...]:
    """Drop the damaged ones among the full snapshots of `checkpoint` and of all that the last proof of failed."""
    catalog, epoch = place.catalog, place.catalog.streams.get(stream).epoch
    suspects = {checkpoint} | {c.id for c in catalog.checkpoints.list(stream) if c.proven is False}
    taken = [
        (o, [s.checkpoint])
        for s in catalog.reference_copies.list(stream)
        if s.checkpoint in suspects
        for o in s.objects
    ]
    for _ in range(2):  # a store may return wrong bytes once
        failures = check_objects(place.warehouse.store, taken)
        taken = [(o, of) for o, of in taken if o.name in {failure.object for failure in failures}]
        if not taken:
            return ()
        place.confirm_store()
    damaged = tuple(sorted({failure.checkpoint for failure in failures}))
    for failure in failures:
        tell(f"the snapshot of checkpoint {failure.checkpoint} is damaged: {failure.reason}")
    if not dry_run:
        try:
            for each in damaged:
                catalog.reference_copies.drop(stream, epoch, each)
        except Fenced:  # somebody runs the stream now: it stays until the next recovery
            return ()
    return damaged


def _clean(place: OpenWarehouse, stream: str, epoch: int | None) -> tuple[int, int]:
    """Complete deletions and sweep: (objects, bytes) deleted. The stream is ready without, so nothing here fails it.

    Without an `epoch` a run may be at work: then as beside it.
    """
    try:
        objects = size_bytes = 0
        if place.catalog.checkpoints.last_id(stream):
            with suppress(Fenced):  # somebody runs it already
                deleted = delete_checkpoints(place, stream, (), epoch=epoch)
                objects, size_bytes = deleted.objects, deleted.bytes
        swept = sweep(place, stream, SweepOptions())
        return objects + swept.deleted, size_bytes + swept.bytes
    except (Unreachable, UnknownCheckpoint, CorruptObject) as error:
        _LOG.warning("stream is ready, but not all that is left over is swept", stream=stream, error=str(error))
        return 0, 0


def span(ids: tuple[int, ...] | list[int]) -> str:
    """Checkpoints for people."""
    low, high = min(ids), max(ids)
    return f"checkpoint {low}" if low == high else f"checkpoints {low} to {high}"
