"""Keep a running stream's storage bounded, in the background: sweep after killed runs, and apply retention.

As checkpoints complete, those that no rule keeps are marked and deleted like any others (`retention.deletion`), guarded
by the run's writer epoch. A round looks at all retained checkpoints. To keep the work per checkpoint constant, a round
happens only once a twentieth of them are new; until then, that twentieth is kept, too.

A step in progress may restore from a chain that was materialized after it began, by this run or by another process. So
while a run is open, deletions leave alone what was replaced since the newest checkpoint (`ObjectRecord.replaced_at`).
"""

import logging
import math
import time
from dataclasses import asdict, dataclass

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.log import get_logger
from siltstone.retention.retention_rules import RetentionOptions, retention_in_force
from siltstone.retention.sweep import sweep_killed
from siltstone.retention.truncate import Truncation, truncate

_LOG = get_logger(__name__)
_PART = 20
"""a round happens once this part (1/20) of the retained checkpoints is new"""
_AT_ONCE = 500
"""checkpoints marked or deleted at a time, so that no transaction delays a commit for long"""
LOG_S = 60.0
"""seconds between two lines of the log, however often retention deletes"""


@dataclass
class _Deleted:
    """What retention deleted since the last line of the log, and how many checkpoints it marked and waits to delete."""

    checkpoints: int = 0
    objects: int = 0
    bytes: int = 0
    waiting: int = 0


class Housekeeper:
    """The housekeeping of one run; for use by one thread.

    Args:
        epoch: the run's writer epoch; once it is fenced, nothing more is deleted.
        given: rules that override those recorded with the stream.
    """

    def __init__(self, warehouse: OpenWarehouse, stream: str, epoch: int, given: RetentionOptions) -> None:
        self._warehouse, self._stream, self._epoch, self._given = warehouse, stream, epoch, given
        self._swept = False
        self._look_from = 1
        """the next round happens once the run has completed this many checkpoints"""
        self._told = False
        self._since, self._waiting = _Deleted(), 0
        self._log_from = -math.inf

    def work(self, completed: int, *, ended: bool = False) -> None:
        """Sweep once, and apply retention if it is time.

        Args:
            completed: how many checkpoints the run has completed.
            ended: no further step will begin.

        Raises:
            Fenced: a newer run has taken the stream over.
            UsageError: the rules keep nothing.
            Unreachable: the store or the catalog failed; the next call continues.
        """
        if not self._swept:
            found = sweep_killed(self._warehouse, self._stream, self._epoch)
            self._swept = True
            if found.deleted:
                _LOG.info("swept after killed runs", stream=self._stream, objects=found.deleted, bytes=found.bytes)
        if completed and (ended or completed >= self._look_from):
            self._apply_retention(completed, ended)

    def _apply_retention(self, completed: int, ended: bool) -> None:
        stream = self._stream
        rules = retention_in_force(self._warehouse.catalog.streams.get(stream).retention, self._given)
        if not rules.rules:
            return
        done = truncate(self._warehouse, stream, self._given, epoch=self._epoch, limit=_AT_ONCE, steps_ended=ended)
        retained = len(done.kept) + len(done.waiting) + len(done.leased)
        self._look_from = completed if done.left else completed + max(1, retained // _PART)
        self._count(done)
        self._log(rules, ended)

    def _count(self, done: Truncation) -> None:
        told = self._since
        told.checkpoints += len(done.deleted)
        told.objects += done.objects
        told.bytes += done.bytes
        told.waiting = len(done.waiting)

    def _log(self, rules: RetentionOptions, ended: bool) -> None:
        """Log what was deleted, and marked, since the last line: the first time as a warning, so that people see it,
        then at level info, at most once a minute."""
        done, now = self._since, time.monotonic()
        deleted = done.checkpoints or done.objects
        if not (deleted or done.waiting != self._waiting) or (not ended and now < self._log_from):
            return
        level, more = logging.INFO, {}
        if deleted and not self._told:
            level, self._told = logging.WARNING, True
            more = {"note": f"later ones at level info; see or change the rules: siltstone retention {self._stream}"}
        _LOG.log(
            level,
            "retention deleted checkpoints" if deleted else "retention marked checkpoints as deleted",
            stream=self._stream,
            epoch=self._epoch,
            rules=rules.described,
            **asdict(done),
            **more,
        )
        self._since, self._log_from, self._waiting = _Deleted(), now + LOG_S, done.waiting
