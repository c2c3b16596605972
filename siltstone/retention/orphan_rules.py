"""Decide which stored objects are orphans: nothing refers to them and nothing ever will. A pure decision.

By name and catalog alone:

    FENCED     of a writer epoch that is not the newest, which can no longer commit (promise 5)
    ENDED      of the newest epoch, whose run has ended
    LATE       of a checkpoint up to the newest completed one. Only the next checkpoint can be committed, so what this
               one refers to is final, and its other objects are from attempts that lost. It does not matter which
               epoch completed it: a newer one has nothing to write for it

By age as well, since a run may be writing them right now:

    ABANDONED  of the newest epoch, for the checkpoint it is writing, if the newest of them is older than the age guard:
               a run logs each step, but a checkpoint may take longer than the guard. If the checkpoint's manifest is
               stored, they stay until the next run takes it over. Objects of later checkpoints (which are pending, or
               the catalog is behind) stay until there is a newer epoch

By the time of a rollback (`catalog.rollbacks`), so that people can still examine them:

    GIVEN_UP   of a checkpoint that was given up longer ago than the age guard

Nothing ever refers again to objects that are FENCED, ENDED, LATE or GIVEN_UP: epochs only grow, as do the checkpoints
of one epoch, and a rollback gives up only what older epochs wrote. How many checkpoints a fenced epoch had begun does
not matter: the catalog is not older than the store (`catalog.epochs`), so it knows all that were completed. The
exception is work beside a run, such as a snapshot of a completed checkpoint: a lease covers its objects until they are
referred to. Everything else is kept, and reported if its name is not Siltstone's.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from siltstone.store.paths import CheckpointPath, epoch_prefix, is_built_here

if TYPE_CHECKING:
    from siltstone.catalog.records.references import CatalogView
    from siltstone.catalog.records.runs import RunRecord
    from siltstone.store.base import Unfinished

AGE_GUARD = timedelta(days=3)
"""the age from which on an object that a run may be writing counts as abandoned"""
ENDED_WELL = frozenset({"done", "stopped"})
"""outcomes of runs that have swept what was left of their last checkpoint"""
KILLED_SWEPT = 10
"""how many failed runs the next run sweeps after"""


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
    """Decide why an object found in the store is to be deleted or kept; None if it is referred to.

    Args:
        name: an object under the prefix of the view's stream.
        view: a view with references to `name`, taken after the object was found.
        modified_at: when it was stored, or a later object of the same epoch and checkpoint; None if not known. It
            matters only if the result without it is WRITING.
    """
    if name in view.referenced:
        return None
    if not is_built_here(name):
        return Reason.STRANGE
    return _judge_place(name, view, age_guard, modified_at)


def judge_unfinished(write: "Unfinished", view: "CatalogView", age_guard: timedelta) -> Reason:
    """Decide why an unfinished write is to be discarded or kept: by its age, unless its run can no longer commit.

    A write whose object is not known may belong to another stream.
    """
    if write.name is not None:
        if not is_built_here(write.name):
            return Reason.STRANGE
        reason = _judge_place(write.name, view, age_guard, write.began_at)
        if reason is not Reason.LATE:
            return reason
    return Reason.ABANDONED if view.at - write.began_at > age_guard else Reason.WRITING


def _judge_place(name: str, view: "CatalogView", age_guard: timedelta, modified_at: datetime | None) -> Reason:
    warehouse = CheckpointPath.of(name)
    assert warehouse is not None
    later = [rollback for rollback in view.rollbacks if warehouse.epoch < rollback.epoch]
    reached = max([view.newest, *(rollback.newest for rollback in later)])
    if (warehouse.epoch, warehouse.checkpoint) > (view.epoch, reached + 1):
        return Reason.AHEAD
    if any(lease.covers(warehouse.checkpoint) for lease in view.leases):
        return Reason.LEASED
    given_up = next((r for r in later if r.gave_up(warehouse.epoch, warehouse.checkpoint)), None)
    if given_up is not None:  # the first rollback counts: later ones gave up objects of later epochs
        return Reason.GIVEN_UP if view.at - given_up.rolled_back_at > age_guard else Reason.LEFT_OVER
    if warehouse.epoch < view.epoch:
        return Reason.FENCED
    if warehouse.checkpoint <= view.newest:
        return Reason.LATE
    if view.ended:
        return Reason.ENDED
    if modified_at is not None and view.at - modified_at > age_guard:
        return Reason.ABANDONED
    return Reason.WRITING


def incomplete_prefixes(runs: Sequence["RunRecord"], view: "CatalogView") -> list[str]:
    """Return prefixes of the names of all objects of checkpoints that never completed, one per run.

    It is the prefix of the epoch if none of its checkpoints is left, else that of the checkpoint that the run had begun
    when the next run took over.

    Args:
        runs: all runs of the stream, oldest first.
    """
    return [
        CheckpointPath(view.stream, epoch, checkpoint).prefix
        if epoch in view.epochs
        else epoch_prefix(view.stream, epoch)
        for epoch, checkpoint in _list_begun(runs, view.newest)
    ]


def killed_prefixes(runs: Sequence["RunRecord"], view: "CatalogView", epoch: int) -> list[str]:
    """Return the `incomplete_prefixes` of the newest runs before `epoch` that did not end well, at most `KILLED_SWEPT`.

    A run that ends well sweeps its own; older ones were swept by earlier runs.

    Args:
        runs: all runs of the stream, oldest first.
    """
    at = [index for index, run in enumerate(runs) if run.epoch < epoch and run.outcome not in ENDED_WELL]
    prefixes = incomplete_prefixes([run for run in runs if run.epoch <= epoch], view)
    return [prefixes[index] for index in at[-KILLED_SWEPT:]]


def _list_begun(runs: Sequence["RunRecord"], newest: int) -> Iterable[tuple[int, int]]:
    """Yield (epoch, the checkpoint it began and did not complete) of each run."""
    for run, later in pairwise(runs):
        yield run.epoch, later.first_checkpoint
    for run in runs[-1:]:
        yield run.epoch, newest + 1
