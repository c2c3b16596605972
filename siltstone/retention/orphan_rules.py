"""Which stored objects can be deleted since nothing refers to them and nothing ever will: a pure decision.

By name and catalog alone, at once:

    FENCED     of a writer epoch that is not the newest, which can commit nothing any more (promise 5)
    ENDED      of the newest epoch, whose run has ended
    LATE       of a checkpoint up to the newest completed one: commits are of the next one only, so this checkpoint
               refers for good to what it refers to now, and its other objects are of attempts that lost. It does not
               matter which epoch completed it: a newer one has nothing to write for it

By age as well, since a run may be writing them right now:

    ABANDONED  of the newest epoch, for the checkpoint it is writing, and older than the age guard

By the time of a rollback (`catalog.rollbacks`), since it may be all that is left for somebody to look at:

    GIVEN_UP   of a checkpoint that was given up longer ago than the age guard

Nothing refers later to what is FENCED, ENDED, LATE or GIVEN_UP: epochs only grow, checkpoints of one epoch do, and a
rollback gives up only what older epochs wrote. The one exception is work beside a run, such as a snapshot of a
checkpoint that completed: it covers its objects with a lease until they are referred to. Everything else is kept, and
told of if it is strange.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from siltstone.store.paths import CheckpointPath, epoch_prefix, is_built_here

if TYPE_CHECKING:
    from siltstone.catalog.references import CatalogView
    from siltstone.catalog.runs import RunRecord
    from siltstone.store.base import Unfinished

AGE_GUARD = timedelta(days=3)
"""how old what a run may be writing must be to be taken for abandoned"""
ENDED_WELL = frozenset({"done", "stopped"})
"""outcomes of runs that have swept what they left of their last checkpoint"""
KILLED_SWEPT = 10
"""behind how many runs that did not end well the next run sweeps"""
IN_FLIGHT = 1
"""how many checkpoints after the newest completed one a run may have objects of"""


class Reason(StrEnum):
    """Why an object that nothing refers to is deleted, or kept."""

    FENCED = "of a fenced run"
    ENDED = "of a run that has ended"
    LATE = "of an attempt that its checkpoint did without"
    ABANDONED = "of the running checkpoint, beyond the age guard"
    GIVEN_UP = "of a checkpoint that was given up, beyond the age guard"
    LEFT_OVER = "of a checkpoint that was given up lately"
    WRITING = "may be being written"
    LEASED = "under a lease"
    AHEAD = "ahead of the catalog"
    STRANGE = "not named by Siltstone"
    BEYOND_LIMIT = "beyond the limit of this run"

    @property
    def deletes(self) -> bool:
        """Whether it is a reason to delete."""
        return self in DELETES


DELETES = frozenset({Reason.FENCED, Reason.ENDED, Reason.LATE, Reason.ABANDONED, Reason.GIVEN_UP})
"""the reasons to delete"""


def judge(name: str, view: "CatalogView", age_guard: timedelta, modified_at: datetime | None = None) -> Reason | None:
    """Why an object found in the store is to be deleted or kept; None if it is referred to.

    Args:
        name: an object under the prefix of the view's stream.
        view: with references to `name`, from after the object was found.
        modified_at: when it was stored, None where that is not known. It matters where the answer without it is
            WRITING.
    """
    if name in view.referenced:
        return None
    if not is_built_here(name):
        return Reason.STRANGE
    return _judge_place(name, view, age_guard, modified_at)


def judge_unfinished(write: "Unfinished", view: "CatalogView", age_guard: timedelta) -> Reason:
    """Why an unfinished write is to be discarded or kept. By its age, but for those of runs that commit nothing more.

    One whose object is not known may be of another stream.
    """
    if write.name is not None:
        if not is_built_here(write.name):
            return Reason.STRANGE
        reason = _judge_place(write.name, view, age_guard, write.began_at)
        if reason is not Reason.LATE:
            return reason
    return Reason.ABANDONED if view.at - write.began_at > age_guard else Reason.WRITING


def _judge_place(name: str, view: "CatalogView", age_guard: timedelta, modified_at: datetime | None) -> Reason:
    place = CheckpointPath.of(name)
    assert place is not None
    later = [rollback for rollback in view.rollbacks if place.epoch < rollback.epoch]
    reached = max([view.newest, *(rollback.newest for rollback in later)])
    if place.epoch > view.epoch or place.checkpoint > reached + IN_FLIGHT:
        return Reason.AHEAD
    if any(lease.covers(place.checkpoint) for lease in view.leases):
        return Reason.LEASED
    given_up = next((r for r in later if r.gave_up(place.epoch, place.checkpoint)), None)
    if given_up is not None:  # by the first that did: what others gave up is of later epochs
        return Reason.GIVEN_UP if view.at - given_up.rolled_back_at > age_guard else Reason.LEFT_OVER
    if place.epoch < view.epoch:
        return Reason.FENCED
    if place.checkpoint <= view.newest:
        return Reason.LATE
    if view.ended:
        return Reason.ENDED
    if modified_at is not None and view.at - modified_at > age_guard:
        return Reason.ABANDONED
    return Reason.WRITING


def incomplete_prefixes(runs: Sequence["RunRecord"], view: "CatalogView") -> list[str]:
    """What the names of all objects begin with that are of checkpoints that never completed.

    One for each run: the whole epoch, where no checkpoint of it is left, or else the checkpoint it had begun when the
    next run took over.

    Args:
        runs: all of the stream, oldest first.
    """
    return [
        CheckpointPath(view.stream, epoch, checkpoint).prefix
        if epoch in view.epochs
        else epoch_prefix(view.stream, epoch)
        for epoch, checkpoint in _begun(runs, view.newest)
    ]


def killed_prefixes(runs: Sequence["RunRecord"], view: "CatalogView", epoch: int) -> list[str]:
    """Those of `incomplete_prefixes` of the newest runs before `epoch` that did not end well, a few: whoever ends well
    sweeps behind itself, and what is older, a run before this one has swept.

    Args:
        runs: all of the stream, oldest first.
    """
    at = [index for index, run in enumerate(runs) if run.epoch < epoch and run.outcome not in ENDED_WELL]
    prefixes = incomplete_prefixes([run for run in runs if run.epoch <= epoch], view)
    return [prefixes[index] for index in at[-KILLED_SWEPT:]]


def _begun(runs: Sequence["RunRecord"], newest: int) -> Iterable[tuple[int, int]]:
    """(epoch, the checkpoint it began and did not complete) of each run."""
    for run, later in pairwise(runs):
        yield run.epoch, later.first_checkpoint
    for run in runs[-1:]:
        yield run.epoch, newest + 1
