"""Materialize a running stream's chains when they are due, and keep its storage bounded, in a background thread.

After each completed checkpoint, and from time to time, the thread applies retention (`retention.housekeeping`) and
materializes the operators that are due (FLIP-158), one after the other, each under its own lease at the newest
checkpoint. The stream neither waits for the thread nor fails with it: errors are logged, and the work is retried later.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import StrEnum

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import chain_facts
from siltstone.chains.materialization_rules import RETRY_S, ChainFacts, MaterializationOptions, Trigger, decide_trigger
from siltstone.chains.materialize import Abandoned, MaterializedPart, MaterializeTask, Run, materialize
from siltstone.chains.policy_rules import PolicyOptions
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import Fenced, UsageError
from siltstone.format.manifest import Manifest
from siltstone.log import get_logger
from siltstone.model import StoredObject
from siltstone.retention.housekeeping import Housekeeper
from siltstone.retention.retention_rules import RetentionOptions

_LOG = get_logger(__name__)
_POLL_MAX_S = 30.0
_LEAST_S = 1.0
"""minimum seconds between two rounds, however fast checkpoints come"""
_CANCEL_S = 5.0


@dataclass(frozen=True)
class BackgroundOptions:
    """Options of a run's background work; `parallelism` is the number of units an operator is split into."""

    materialization: MaterializationOptions = field(default_factory=MaterializationOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    parallelism: int = 1
    upload: UploadOptions = field(default_factory=UploadOptions)


class MaterializationEvent(StrEnum):
    """What a materialization did."""

    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    GIVEN_UP = "given-up"
    """the run ended, or another process was at it"""


class Background:
    """One run's thread. `start` it, report each checkpoint (`note_checkpoint`), and end it with `finish` or `stop`.

    Args:
        epoch: the run's writer epoch.
        run: maps a function over the units of a materialization; called in the thread.
        cancel: cancels a call of `run` from another thread; `run` may then raise anything.
        uploaded: called in the thread with the statistics of what materializations stored.
        postponed: called with an operator, and the manifest of the materialization that its chain in the catalog begins
            with; returns why the run leaves the operator's next base to this thread, or None if it does not
            (`RunChains.find_postponed`).
        made: called in the thread with the manifest of each materialization, as soon as it is complete.
        counted: called with an operator, what its materialization did (`MaterializationEvent`), and its seconds so far.
    """

    def __init__(
        self,
        warehouse: OpenWarehouse,
        stream: str,
        epoch: int,
        options: BackgroundOptions,
        run: Run,
        cancel: Callable[[], None] = lambda: None,
        uploaded: Callable[[UploadStatistics], None] = lambda _: None,
        postponed: Callable[[str, str | None], str | None] = lambda *_: None,
        made: Callable[[StoredObject, Manifest], None] = lambda *_: None,
        counted: Callable[[str, MaterializationEvent, float], None] = lambda *_: None,
    ) -> None:
        self._warehouse, self._stream, self._options = warehouse, stream, options
        self._run, self._cancel, self._uploaded, self._postponed, self._made = run, cancel, uploaded, postponed, made
        self._counted = counted
        self._housekeeper = Housekeeper(warehouse, stream, epoch, options.retention)
        name, in_context = f"siltstone-materialize-{stream}", copy_context().run
        self._thread = threading.Thread(target=in_context, args=(self._work,), name=name, daemon=True)
        self._woken, self._ending, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._completed = 0
        """number of checkpoints reported so far"""
        self._said = ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note_checkpoint(self) -> None:
        """Note that the run has completed a checkpoint."""
        self._completed += 1
        self._woken.set()

    def finish(self, wait_s: float = 10.0) -> None:
        """End after a run that succeeded: do a last round, waiting at most `wait_s` seconds for it."""
        self._ending.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        self.stop()

    def stop(self) -> None:
        """End at once, abandoning a materialization in progress. It commits whole or not at all, so nothing breaks."""
        self._abandoned.set()
        self._ending.set()
        self._woken.set()
        if self._thread.is_alive():
            self._cancel()
            self._thread.join(_CANCEL_S)

    def _work(self) -> None:
        interval_s = self._options.materialization.interval_s or _POLL_MAX_S
        poll_s = min(_POLL_MAX_S, interval_s / 4)
        while not self._ending.is_set():
            self._ending.wait(min(_LEAST_S, poll_s) if self.look() else RETRY_S)
            self._woken.wait(poll_s)
            self._woken.clear()
        if not self._abandoned.is_set():
            self.look()

    def look(self) -> bool:
        """Do one round: delete what is to go, and materialize every operator that is due.

        Returns:
            False if something failed, so that the next round should wait longer.
        """
        tidied = self._keep_house()
        if not self._options.materialization.enabled:
            return tidied
        try:
            tried: dict[str, bool] = {}
            while found := next((each for each in self._find_due() if each[0].operator not in tried), None):
                tried[found[0].operator] = self._materialize(*found)
            return tidied and all(tried.values())
        except Exception as error:  # the stream goes on, whatever fails here
            _LOG.warning("not materialized for now", stream=self._stream, error=str(error))
            return False

    def _keep_house(self) -> bool:
        """Sweep and apply retention; return False if that failed."""
        ended = self._ending.is_set() and not self._abandoned.is_set()
        try:
            self._housekeeper.work(self._completed, ended=ended)
        except Fenced as error:  # the run learns of it at its next commit
            _LOG.info("fenced: nothing is deleted any more", stream=self._stream, error=str(error))
            return False
        except Exception as error:  # the stream goes on, whatever fails here
            if not self._abandoned.is_set():
                level = logging.DEBUG if str(error) == self._said else logging.WARNING
                _LOG.log(level, "retention is not applied for now", stream=self._stream, error=str(error))
                self._said = str(error)
            return False
        self._said = ""
        return True

    def _find_due(self) -> Iterator[tuple[ChainFacts, Trigger]]:
        options = self._options
        if self._abandoned.is_set():
            return
        for facts in chain_facts(self._warehouse.catalog, self._stream):
            postponed = self._postponed(facts.operator, facts.base)
            trigger = decide_trigger(
                facts, self._warehouse.catalog.now(), options.materialization, options.policy, postponed
            )
            if trigger is not None:
                yield facts, trigger

    def _materialize(self, facts: ChainFacts, trigger: Trigger) -> bool:
        """Materialize one operator, or log why not; return False if another process is at it."""
        operator, checkpoint = trigger.operator, trigger.checkpoint
        log = _LOG.bind(stream=self._stream, operator=operator, checkpoint=checkpoint)
        log.debug("materialization begins", reason=trigger.reason)
        began_s = time.perf_counter()

        def count(event: MaterializationEvent) -> None:
            self._counted(operator, event, time.perf_counter() - began_s)

        count(MaterializationEvent.STARTED)
        try:
            done = materialize(
                self._warehouse,
                self._stream,
                operator,
                checkpoint,
                id=uuid.uuid4().hex,
                parallelism=self._options.parallelism,
                run=self._map_tasks,
                upload=self._options.upload,
                uploaded=self._uploaded,
                completed=self._made,
            )
        except Abandoned:
            count(MaterializationEvent.GIVEN_UP)
            log.info("materialization given up, as the run ends")
        except UsageError as error:  # another process is at it, or was faster
            count(MaterializationEvent.GIVEN_UP)
            log.info("not materialized here", reason=str(error))
            return False
        except Exception as error:
            count(MaterializationEvent.FAILED)
            failures, allowed = facts.failures + 1, self._options.materialization.max_failures_allowed
            level = logging.ERROR if failures >= allowed else logging.WARNING
            log.log(level, "materialization failed", failures_in_a_row=failures, allowed=allowed, error=str(error))
        else:
            count(MaterializationEvent.COMPLETED)
            log.debug("materialized", rows=done.rows, bytes=done.bytes, seconds=round(done.seconds, 3))
        return True

    def _map_tasks(
        self, function: Callable[[MaterializeTask], MaterializedPart], tasks: Sequence[MaterializeTask]
    ) -> list[MaterializedPart]:
        try:
            return self._run(function, tasks)
        except Exception:
            if self._abandoned.is_set():
                raise Abandoned from None
            raise
