"""Note when the steps and checkpoints of a region changed their states, for the timeline of `siltstone report`.

The protocol (`run.protocol_rules`) has every state, so the difference of two regions says what has just happened,
however many checkpoints are pending:

    step         begun, logged
    checkpoint   drain      its last step has begun
                 prepared   every task has handed over its changes
                 storing    its bytes are on their way
                 durable    they are in the store, with its manifest
                 complete   the catalog has it
                 delivered  its outputs have left

A manifest carries what was noted since the one before. So what becomes of a checkpoint after its manifest is written is
in the next manifest; of the newest one, the catalog knows when it was committed.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from siltstone.run.protocol_rules import CheckpointState, Region

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

        def after(at_s: float | None) -> int | None:
            return None if at_s is None else round(1000 * (at_s - first_s))

        return {
            "from": round(1000 * first_s),
            "steps": [[number, *map(after, at)] for number, at in shown.items()],
            "checkpoints": [[id, *(after(of.get(event)) for event in EVENTS)] for id, of in checkpoints.items()],
        }

    def _note(self, checkpoint: int, event: str, now_s: float) -> None:
        self._checkpoints.setdefault(checkpoint, {})[event] = now_s
