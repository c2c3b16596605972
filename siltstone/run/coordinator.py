"""The coordinator of a consistent region: asks the protocol what is allowed, has it done, and notes what came of it.

It holds one `protocol_rules.Region` and does no I/O of its own. `ConsistentRegion` and the simulation tell it how to
store and commit a checkpoint, so both run this code.
"""

import time
from collections.abc import Callable

from siltstone.errors import Fenced, SiltstoneError, Unreachable
from siltstone.run import protocol_rules as rules
from siltstone.run.protocol_rules import Checkpoint, Interval, Region, RunningStep


class Coordinator:
    """Takes the steps and checkpoints of one epoch in turn. Not safe for use by two threads at a time.

    Args:
        region: where the epoch begins (`protocol_rules.open_region`).
        interval: when an interval ends in a checkpoint.
        now_s: a clock in seconds that never goes back.
    """

    def __init__(self, region: Region, interval: Interval, now_s: Callable[[], float] = time.monotonic) -> None:
        self.region = region
        """the region as the protocol has it"""
        self._interval, self._now_s = interval, now_s
        self._checkpoint_s = self._step_s = now_s()

    def begin_step(self, *, ends: bool | None = None) -> RunningStep:
        """Begin the next step; None for `ends` decides by the interval.

        Raises:
            StateError: the region takes no step now.
        """
        if ends is None:
            ends = rules.ends_interval(self.region, self._interval, self._now_s() - self._checkpoint_s)
        self.region = rules.begin_step(self.region, ends=ends)
        self._step_s = self._now_s()
        running = self.region.running
        assert running is not None, "it has just begun"
        return running

    def acknowledge(self, operator: str) -> None:
        """Take the acknowledgements of all subtasks of an operator.

        Raises:
            StateError: the operator is not awaited.
        """
        self.region = rules.acknowledge(self.region, operator)

    def complete(self, store: Callable[[Checkpoint], None], commit: Callable[[Checkpoint], None]) -> Checkpoint:
        """Have the oldest prepared checkpoint stored and committed.

        A failure leaves the region `resetting`, with the checkpoint failed, or in doubt if the catalog did not answer
        its commit. A fenced commit leaves it `ended`.

        Args:
            store: stores everything that the manifest names, the outputs, and last the manifest.
            commit: commits the checkpoint to the catalog, in one transaction guarded by the writer epoch.

        Raises:
            StateError: no checkpoint is prepared.
            Exception: what `store` or `commit` raised.
        """
        self.region = rules.begin_storing(self.region)
        checkpoint = next(c for c in self.region.pending if c.state is rules.CheckpointState.PENDING)
        try:
            store(checkpoint)
            self.region = rules.note_durable(self.region, checkpoint.id)
        except BaseException:
            self.fail()
            raise
        try:
            commit(checkpoint)
        except Fenced:
            self.region = rules.note_fenced(self.region)
            raise
        except SiltstoneError as error:
            doubted = isinstance(error, Unreachable)
            self.region = rules.note_in_doubt(self.region, checkpoint.id) if doubted else rules.note_failed(self.region)
            raise
        except BaseException:
            self.region = rules.note_in_doubt(self.region, checkpoint.id)
            raise
        self.region = rules.note_committed(self.region, checkpoint.id)
        self._checkpoint_s = self._now_s()
        return checkpoint

    def deliver(self, give: Callable[[], bool]) -> None:
        """Have all outputs of complete checkpoints delivered.

        Args:
            give: delivers them; returns False if some must wait for a checkpoint that is to be made again.
        """
        try:
            if give():
                self.region = rules.note_delivered(self.region)
        except Fenced:
            self.region = rules.note_fenced(self.region)
            raise
        except BaseException:
            self.fail()
            raise

    def is_overdue(self) -> bool:
        """Whether a step without input is to end the interval now."""
        now_s = self._now_s()
        return rules.is_overdue(self.region, self._interval, now_s - self._checkpoint_s, now_s - self._step_s)

    def fail(self) -> None:
        """Note that a step or a checkpoint failed: only a new epoch may go on."""
        self.region = rules.note_failed(self.region)

    def end(self) -> None:
        """Note that the run has ended under this epoch."""
        self.region = rules.end_region(self.region)
