"""The coordinator of a consistent region: asks the protocol what is allowed, has it done, and notes what came of it.

It holds one `protocol_rules.Region` and does no I/O of its own. `ConsistentRegion` and the simulation tell it how to
store and commit a checkpoint, so both run this code.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from siltstone.errors import Fenced, SiltstoneError, Unreachable
from siltstone.run import protocol_rules as rules
from siltstone.run.protocol_rules import Checkpoint, CheckpointState, Interval, Region, RunningStep

EVENTS = ("drain", "prepared", "storing", "durable", "complete", "delivered")
"""what is noted of a checkpoint, in order"""
STEPS_MAX = 50
"""most steps that one manifest carries the times of: the newest"""


class CheckpointTimes:
    """The times of what has happened since the newest manifest; thread-safe.

    Args:
        now_s: the time of day, in seconds since 1970.
    """

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._steps: dict[int, list[float]] = {}
        self._checkpoints: dict[int, dict[str, float]] = {}
        self._undelivered: set[int] = set()

    def observe(self, before: Region, after: Region) -> None:
        """Note what has happened between two states of the region, as of now."""
        now_s = self._now_s()
        with self._lock:
            running = after.running
            if running is not None and before.running is None:
                self._steps[running.number] = [now_s]
                if running.ends:
                    self._note(after.next_checkpoint, "drain", now_s)
            if before.running is not None and running is None and before.running.number in self._steps:
                self._steps[before.running.number].append(now_s)
            states = {each.id: each for each in before.pending}
            for each in after.pending:
                known = states.get(each.id)
                if known is None:
                    self._note(each.id, "prepared", now_s)
                elif each.state is CheckpointState.PENDING and known.state is CheckpointState.PREPARED:
                    self._note(each.id, "storing", now_s)
                elif each.durable and not known.durable:
                    self._note(each.id, "durable", now_s)
            for id in range(before.completed + 1, after.completed + 1):
                self._note(id, "complete", now_s)
                self._undelivered.add(id)
            if after.delivered != before.delivered:
                for id in sorted(id for id in self._undelivered if id <= after.delivered):
                    self._note(id, "delivered", now_s)
                    self._undelivered.remove(id)

    def take(self) -> dict[str, Any]:
        """Return what was noted since the last call, as JSON: `from` is the earliest time, in milliseconds since 1970,
        and all others are milliseconds after it.

        `steps` are [number, begun, logged], `checkpoints` [id, *EVENTS], with None for what has not happened or was
        returned before.
        """
        with self._lock:
            steps = {number: at for number, at in self._steps.items() if len(at) == 2}
            shown = dict(list(steps.items())[-STEPS_MAX:])
            checkpoints = self._checkpoints
            self._checkpoints = {}
            for number in steps:
                del self._steps[number]
        times = [*(s for at in shown.values() for s in at), *(s for of in checkpoints.values() for s in of.values())]
        first_s = min(times, default=self._now_s())

        def to_ms(at_s: float | None) -> int | None:
            return None if at_s is None else round(1000 * (at_s - first_s))

        return {
            "from": round(1000 * first_s),
            "steps": [[number, *map(to_ms, at)] for number, at in shown.items()],
            "checkpoints": [[id, *(to_ms(of.get(event)) for event in EVENTS)] for id, of in checkpoints.items()],
        }

    def _note(self, checkpoint: int, event: str, now_s: float) -> None:
        self._checkpoints.setdefault(checkpoint, {})[event] = now_s


P = ParamSpec("P")


class Coordinator:
    """Takes the steps and checkpoints of one epoch in turn.

    One thread takes steps. Meanwhile, other threads may each store a checkpoint but for its manifest (`begin_storing`),
    one may `store` it to the end, and one may `deliver`; `commit` comes between two steps.

    Args:
        region: where the epoch begins (`protocol_rules.open_region`).
        interval: when an interval ends in a checkpoint.
        now_s: a clock in seconds that never goes back.
    """

    def __init__(self, region: Region, interval: Interval, now_s: Callable[[], float] = time.monotonic) -> None:
        self._region = region
        self.times = CheckpointTimes()
        """when the region changed"""
        self._interval, self._now_s = interval, now_s
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        """what failed first"""
        self._checkpoint_s = self._step_s = now_s()

    @property
    def region(self) -> Region:
        """The region as the protocol has it."""
        return self._region

    @region.setter
    def region(self, region: Region) -> None:
        before, self._region = self._region, region
        self.times.observe(before, region)

    def ends_next(self) -> bool:
        """Whether the next step ends in a checkpoint, by the interval."""
        return rules.ends_interval(self.region, self._interval, self._now_s() - self._checkpoint_s)

    def begin_step(self, *, ends: bool | None = None) -> RunningStep:
        """Begin the next step; None for `ends` decides by the interval.

        Raises:
            StateError: the region takes no step now.
        """
        self._move(rules.begin_step, ends=self.ends_next() if ends is None else ends)
        self._step_s = self._now_s()
        running = self.region.running
        assert running is not None, "it has just begun"
        if running.ends:  # not at its commit: until then, each further step would end in a checkpoint, too
            self._checkpoint_s = self._step_s
        return running

    def acknowledge(self, operator: str) -> None:
        """Take the acknowledgements of all subtasks of an operator.

        Raises:
            StateError: the operator is not awaited.
        """
        self._move(rules.acknowledge, operator)

    def begin_storing(self, checkpoint: int) -> None:
        """Begin to store a prepared checkpoint, all but its manifest; several may be stored side by side.

        Raises:
            StateError: it is not prepared, or the region has failed meanwhile.
        """
        self._move(rules.begin_storing, checkpoint)

    def store(self, store: Callable[[Checkpoint], None]) -> Checkpoint:
        """Have the oldest checkpoint stored to the end, while further steps may be taken.

        Args:
            store: stores what is left of it, or waits until it is stored, and last the manifest.

        Raises:
            StateError: no checkpoint is prepared, the one before it is not complete, or the region has failed.
            Exception: what `store` raised; the region is `resetting`, and the checkpoint failed.
        """
        checkpoint = rules.find_unstored(self.region)
        try:
            store(checkpoint)
            self._move(rules.note_durable, checkpoint.id)
        except BaseException as error:
            self.fail(error)
            raise
        return checkpoint

    def commit(self, commit: Callable[[Checkpoint], None]) -> Checkpoint:
        """Have the oldest pending checkpoint committed; it is durable, and no step is running.

        A failure leaves the region `resetting`, with the checkpoint failed, or in doubt if the catalog did not answer
        its commit. A fenced commit leaves it `ended`. The catalog's answer decides, whatever else fails.

        Args:
            commit: commits the checkpoint to the catalog, in one transaction guarded by the writer epoch.

        Raises:
            StateError: the protocol does not allow the commit.
            Exception: what `commit` raised.
        """
        self._move(rules.begin_commit)
        checkpoint = self.region.pending[0]
        try:
            commit(checkpoint)
        except BaseException as error:
            if isinstance(error, SiltstoneError) and not isinstance(error, Unreachable):
                self._move(rules.note_refused, checkpoint.id)
            self.fail(error)
            raise
        self._move(rules.note_committed, checkpoint.id)
        return checkpoint

    def deliver(self, give: Callable[[], bool]) -> None:
        """Have all outputs of complete checkpoints delivered, while further steps may be taken.

        Args:
            give: delivers them; returns False if some must wait for a checkpoint that is to be made again.
        """
        completed = self.region.completed
        try:
            if give():
                self._move(rules.note_delivered, completed)
        except BaseException as error:
            self.fail(error)
            raise

    def is_overdue(self) -> bool:
        """Whether a step without rows is to end the interval now."""
        now_s = self._now_s()
        return rules.is_overdue(self.region, self._interval, now_s - self._checkpoint_s, now_s - self._step_s)

    def fail(self, error: BaseException) -> BaseException:
        """Note that a step or a checkpoint failed: only a new epoch may go on.

        Returns:
            What failed first: the others are refused what they were about to do because of it.
        """
        with self._lock:
            self._failure = self._failure or error
            note = rules.note_fenced if isinstance(error, Fenced) else rules.note_failed
            self.region = note(self.region)
            return self._failure

    def end(self) -> None:
        """Note that the run has ended under this epoch."""
        self._move(rules.end_region)

    def _move(self, rule: Callable[Concatenate[Region, P], Region], *args: P.args, **kwargs: P.kwargs) -> None:
        with self._lock:
            self.region = rule(self.region, *args, **kwargs)
