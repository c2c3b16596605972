"""Keeps a running stream's storage bounded, in the background: sweeps what its killed runs left, applies retention.

What no rule keeps is marked as checkpoints complete, and deleted by the same steps as any deletion
(`retention.deletion`), guarded by the run's writer epoch. To tell what goes, all that is retained is looked at; so that
this takes the same work per checkpoint however much is retained, it happens once a twentieth as many checkpoints are
new. Until then that twentieth is kept, too.

A step that is under way may restore from a chain that has been materialized since it began, by this run or by another
process. So the run says what its steps restore from, and that stays, whatever the catalog says by now.
"""

import logging

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.log import get_logger
from siltstone.retention.retention_rules import RetentionOptions, retention_in_force
from siltstone.retention.sweep import sweep_killed
from siltstone.retention.truncate import Truncation, Waiting, truncate

_LOG = get_logger(__name__)
_PART = 20
"""one look at all that is retained for this part of it that is new"""
_AT_ONCE = 500
"""checkpoints marked or deleted at a time, so that no transaction keeps a commit waiting"""


class Housekeeper:
    """The housekeeping of one run; for use by one thread.

    Args:
        epoch: the run's own; once it is fenced, nothing is deleted any more.
        given: rules that stand in for those recorded with the stream.
    """

    def __init__(self, place: OpenWarehouse, stream: str, epoch: int, given: RetentionOptions) -> None:
        self._place, self._stream, self._epoch, self._given = place, stream, epoch, given
        self._swept = False
        self._look_from = 1
        """look once the run has completed so many checkpoints"""
        self._told = False
        self._waiting: tuple[Waiting, ...] = ()

    def work(self, completed: int, restores_from: int | None = None, *, ended: bool = False) -> None:
        """Do what is to be done now.

        Args:
            completed: how many checkpoints the run has completed.
            restores_from: the checkpoint from which on its steps may restore (`Completed.restores_from`).
            ended: no further step will begin.

        Raises:
            Fenced: a newer run has the stream.
            UsageError: the rules keep nothing.
            Unreachable: the store or the catalog failed; what is left is done the next time.
        """
        if not self._swept:
            found = sweep_killed(self._place, self._stream, self._epoch)
            self._swept = True
            if found.deleted:
                _LOG.info("swept what killed runs left", stream=self._stream, objects=found.deleted, bytes=found.bytes)
        if completed and (ended or completed >= self._look_from):
            self._apply_retention(completed, None if ended else restores_from)

    def _apply_retention(self, completed: int, restores_from: int | None) -> None:
        stream = self._stream
        rules = retention_in_force(self._place.catalog.streams.get(stream).retention, self._given)
        if not rules.rules:
            return
        done = truncate(
            self._place, stream, self._given, epoch=self._epoch, limit=_AT_ONCE, restores_from=restores_from
        )
        retained = len(done.kept) + len(done.waiting) + len(done.leased)
        self._look_from = completed if done.left else completed + max(1, retained // _PART)
        if done.deleted or done.objects:
            self._tell(done, rules)
        elif done.waiting and done.waiting != self._waiting:
            # Nothing has gone yet; what is marked nobody sees any more.
            _LOG.info(
                "retention marked checkpoints as deleted",
                stream=stream,
                epoch=self._epoch,
                rules=rules.described,
                waiting=len(done.waiting),
            )
        self._waiting = done.waiting

    def _tell(self, done: Truncation, rules: RetentionOptions) -> None:
        """The first time where people see it; who runs a stream for weeks need not read it each time."""
        level, more = logging.INFO, {}
        if not self._told:
            level, self._told = logging.WARNING, True
            more = {"note": f"further ones at level info; see or change the rules: siltstone retention {self._stream}"}
        _LOG.log(
            level,
            "retention deleted checkpoints",
            stream=self._stream,
            epoch=self._epoch,
            rules=rules.described,
            checkpoints=len(done.deleted),
            first=min(done.deleted, default=None),
            last=max(done.deleted, default=None),
            objects=done.objects,
            bytes=done.bytes,
            **more,
        )
