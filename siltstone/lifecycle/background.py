"""Materializes a running stream's chains as they become due, in a thread beside it (FLIP-158).

It looks after each completed checkpoint and from time to time, and materializes what is due, one operator after the
other, each under its own lease at the newest checkpoint. The stream neither waits for it nor fails with it: what goes
wrong is recorded and logged, and tried again later. After a success, retention is applied, so that what chains began
with before can go.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from siltstone.catalog.place import Place
from siltstone.errors import UsageError
from siltstone.lifecycle.compaction import chain_facts
from siltstone.lifecycle.materialize import Abandoned, MaterializedPart, MaterializeTask, Run, materialize
from siltstone.lifecycle.retention import truncate
from siltstone.policy.compaction import RETRY_S, ChainFacts, MaterializationOptions, Trigger, due
from siltstone.policy.protocol import PolicyOptions
from siltstone.policy.retention import RetentionOptions

_LOG = logging.getLogger(__name__)
_POLL_MAX_S = 30.0
_LEAST_S = 1.0
"""between two looks, however fast checkpoints come"""
_CANCEL_S = 5.0


@dataclass(frozen=True)
class BackgroundOptions:
    """What a run's background goes by; `parallelism` is how many units an operator is split into."""

    materialization: MaterializationOptions = field(default_factory=MaterializationOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    parallelism: int = 1


class Background:
    """One run's thread. `start` it, tell it of each checkpoint (`completed`), and end it with `finish` or `stop`.

    Args:
        run: maps a function over the units of a materialization; called in the thread.
        cancel: ends what `run` is doing, from another thread; `run` may then raise anything.
    """

    def __init__(
        self,
        place: Place,
        stream: str,
        options: BackgroundOptions,
        run: Run,
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._place, self._stream, self._options = place, stream, options
        self._run, self._cancel = run, cancel
        self._thread = threading.Thread(target=self._work, name=f"siltstone-materialize-{stream}", daemon=True)
        self._woken, self._ending, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._completed = 0
        self._truncate_from: int | None = None
        """truncate once so many checkpoints were completed"""

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def completed(self) -> None:
        """The run has completed a checkpoint, and no step is under way."""
        self._completed += 1
        self._woken.set()

    def finish(self, wait_s: float = 10.0) -> None:
        """The run has ended well: look a last time, and wait for what is due, but not for long."""
        self._ending.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        self.stop()

    def stop(self) -> None:
        """End at once: what is under way is given up. It holds a lease and commits whole or not at all."""
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
        """Truncate if it is time, and materialize every operator that is due; False where that had better wait."""
        try:
            self._truncate()
            tried: dict[str, bool] = {}
            while found := next((each for each in self._due() if each[0].operator not in tried), None):
                tried[found[0].operator] = self._materialize(*found)
            return all(tried.values())
        except Exception as error:  # the stream goes on whatever fails here
            _LOG.warning("%s is not materialized for now: %s", self._stream, error)
            return False

    def _truncate(self) -> None:
        """Apply retention, once after a success. A step that was begun before that may restore from what its chain
        read then, so a checkpoint later, or when the run has ended well."""
        ended = self._ending.is_set() and not self._abandoned.is_set()
        if self._truncate_from is None or not (ended or self._completed >= self._truncate_from):
            return
        self._truncate_from = None
        done = truncate(self._place, self._stream, self._options.retention)
        _LOG.info("%s: %d checkpoints deleted, %d bytes", self._stream, len(done.deleted), done.bytes)

    def _due(self) -> Iterator[tuple[ChainFacts, Trigger]]:
        options = self._options
        if self._abandoned.is_set():
            return
        for facts in chain_facts(self._place.catalog, self._stream):
            trigger = due(facts, self._place.catalog.now(), options.materialization, options.policy)
            if trigger is not None:
                yield facts, trigger

    def _materialize(self, facts: ChainFacts, trigger: Trigger) -> bool:
        """Do it, or say why not; False where somebody else is at it."""
        operator, checkpoint = trigger.operator, trigger.checkpoint
        where = f"{operator} of {self._stream} at checkpoint {checkpoint}"
        _LOG.info("materializing %s: %s", where, trigger.reason)
        try:
            done = materialize(
                self._place,
                self._stream,
                operator,
                checkpoint,
                id=uuid.uuid4().hex,
                parallelism=self._options.parallelism,
                run=self._mapped,
            )
        except Abandoned:
            _LOG.info("materializing %s was given up, as the run ends", where)
        except UsageError as error:  # somebody else is at it, or was faster
            _LOG.info("%s", error)
            return False
        except Exception as error:
            failures, allowed = facts.failures + 1, self._options.materialization.max_failures_allowed
            level = logging.ERROR if failures >= allowed else logging.WARNING
            _LOG.log(level, "materializing %s failed %d times in a row: %s", where, failures, error)
        else:
            _LOG.info("materialized %s: %d rows, %d bytes, %.2f s", where, done.rows, done.bytes, done.seconds)
            if self._options.retention.rules:
                self._truncate_from = self._completed + 1
        return True

    def _mapped(
        self, function: Callable[[MaterializeTask], MaterializedPart], tasks: Sequence[MaterializeTask]
    ) -> list[MaterializedPart]:
        try:
            return self._run(function, tasks)
        except Exception:
            if self._abandoned.is_set():
                raise Abandoned from None
            raise
