"""Requests that everything a run has processed so far is in a complete checkpoint.

They are the calls `makeConsistent` and `makeConsistentNonBlocking` of Teracloud Streams. The next step ends in a
checkpoint; if none comes, a step without rows does. A request is answered by the first checkpoint prepared after it.
"""

import threading
from enum import StrEnum


class DrainResult(StrEnum):
    """How far the checkpoint that answers a request is."""

    CHECKPOINT_PENDING = "pending"
    """it is prepared: what it holds is settled, and the stream may go on"""
    COMPLETED = "completed"
    """it is complete, and its outputs are delivered"""
    FAILED = "failed"
    """the run has ended, or was reset, before that"""


class Request:
    """One request; `result` is None until its checkpoint is prepared."""

    def __init__(self, changed: threading.Condition) -> None:
        self.result: DrainResult | None = None
        self._changed = changed

    def wait(self, *, until_complete: bool, timeout_s: float | None = None) -> DrainResult | None:
        """Wait until the checkpoint is complete, or prepared at least; return `result`, also after the timeout."""
        unfinished = {None, DrainResult.CHECKPOINT_PENDING} if until_complete else {None}
        with self._changed:
            self._changed.wait_for(lambda: self.result not in unfinished, timeout_s)
            return self.result


class ConsistencyRequests:
    """The requests of one run of a stream; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Request] = []
        self._pending: dict[int, list[Request]] = {}
        """checkpoint that is prepared -> the requests that it answers"""
        self._ended = False

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for a checkpoint that is not prepared."""
        return bool(self._waiting)

    def add(self) -> Request:
        """Ask for a checkpoint."""
        with self._changed:
            request = Request(self._changed)
            if self._ended:
                request.result = DrainResult.FAILED
            else:
                self._waiting.append(request)
            return request

    def note_prepared(self, checkpoint: int) -> None:
        """Note that a checkpoint is prepared."""
        with self._changed:
            self._pending[checkpoint] = self._answer(self._waiting, DrainResult.CHECKPOINT_PENDING)
            self._waiting = []

    def note_completed(self, checkpoint: int) -> None:
        """Note that a checkpoint is complete, and its outputs are delivered."""
        with self._changed:
            self._answer(self._pending.pop(checkpoint, []), DrainResult.COMPLETED)

    def note_caught_up(self) -> None:
        """Note that everything processed is in complete checkpoints."""
        with self._changed:
            self._answer(self._waiting, DrainResult.COMPLETED)
            self._waiting = []

    def note_failed(self, *, ended: bool = False) -> None:
        """Note that the run was reset, or has ended: nothing that is asked for will complete."""
        with self._changed:
            self._ended = self._ended or ended
            for requests in (self._waiting, *self._pending.values()):
                self._answer(requests, DrainResult.FAILED)
            self._waiting, self._pending = [], {}

    def _answer(self, requests: list[Request], result: DrainResult) -> list[Request]:
        for request in requests:
            request.result = result
        self._changed.notify_all()
        return requests
