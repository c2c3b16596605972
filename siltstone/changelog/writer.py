"""Log what one step of a subtask changed: one changeset of the durable short-term log (FLIP-158).

    writer.append(change)              the change is not durable yet
    handles = writer.persist()         a future: each of them is in the store, or handed over inline

A worker may end as soon as its task does. So a writer lives for one task, and the log goes on from task to task: the
sequence number of a changeset is the number of its step, and the driver keeps what is persisted (`changelog.log`).
"""

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, Self

from siltstone.changelog.changes import Change, OpaqueChange, WholeTable
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Placed
from siltstone.errors import UsageError
from siltstone.format.segment import Segment, SegmentBuilder
from siltstone.model import Handle, KeyGroupRange, StoredObject
from siltstone.store.paths import StepPath


class Uploads(Protocol):
    """The methods of `Uploader` that a writer uses."""

    options: UploadOptions
    checksums: str
    """algorithm of the checksums in handles"""
    open_writer: Callable[[str], None]
    close_writer: Callable[[str], None]
    discard: Callable[[Placed], None]

    def submit(self, path: StepPath, segment: Segment) -> "Future[Placed]":
        """Store a segment."""
        ...


@dataclass(frozen=True)
class Changeset:
    """Where a changeset is stored.

    Attributes:
        handles: one per variable and segment, with the changeset's sequence number.
        objects: what they refer to; other writers' changes may be in there, too.
    """

    handles: tuple[Handle, ...] = ()
    objects: tuple[StoredObject, ...] = ()


class ChangelogWriter:
    """Logs the changes of some key groups of one operator in one step, under the names of `path`.

    Use it as a context manager, from one thread: what it stored and did not return is deleted at the end, on best
    effort. Futures complete on other threads.
    """

    def __init__(self, uploader: Uploads, operator: str, key_groups: KeyGroupRange, path: StepPath) -> None:
        self.log_id = uuid.uuid4().hex
        self._path = path
        self._uploader = uploader
        self._operator = operator
        self._key_groups = key_groups
        self._variables: set[str] = set()
        """those that changed"""
        self._waiting: list[Change | WholeTable | OpaqueChange] = []
        """changes that are not sent"""
        self._sent: list[Future[Placed]] = []
        self._closed = False
        uploader.open_writer(self.log_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._closed:
            self._close()
            for future in self._sent:
                future.add_done_callback(self._discard)

    def append(self, change: Change | WholeTable | OpaqueChange) -> None:
        """Log a variable's change.

        If more than `preemptive_persist_bytes` have not been sent, this sends them, and may block until the uploader
        has room.

        Raises:
            UsageError: the change is of other key groups, or of a variable that has one already, or `persist` was
                called.
        """
        own = self._key_groups
        self._check_open()
        if change.spread and change.spread.intersect(own) != change.spread:
            raise UsageError(
                f"a change of {change.variable} for key groups {change.spread.start} to {change.spread.end} cannot be "
                f"logged by {self._operator}'s writer of {own.start} to {own.end}"
            )
        if change.variable in self._variables:
            raise UsageError(f"{change.variable} of {self._operator} changed twice in step {self._path.step}")
        self._variables.add(change.variable)
        self._waiting.append(change)
        if sum(each.size_bytes for each in self._waiting) > self._uploader.options.preemptive_persist_bytes:
            self._send()

    def persist(self) -> "Future[Changeset]":
        """Make all changes durable, and end the writer. The future fails if any upload fails; then nothing is kept.

        Raises:
            UsageError: it was called before.
        """
        self._check_open()
        if self._waiting:
            self._send()
        self._close()
        done: Future[Changeset] = Future()
        lock, left = threading.Lock(), len(self._sent)

        def finish_one(_: "Future[Placed] | None") -> None:
            nonlocal left
            with lock:
                left -= 1
                if left > 0:
                    return
            try:
                done.set_result(self._changeset([future.result() for future in self._sent]))
            except BaseException as error:
                for future in self._sent:
                    self._discard(future)
                done.set_exception(error)

        for future in self._sent:
            future.add_done_callback(finish_one)
        if not self._sent:
            finish_one(None)
        return done

    def _changeset(self, placed: "list[Placed]") -> Changeset:
        handles = [replace(handle, sqn=self._path.step) for each in placed for handle in each.handles]
        objects = {stored.name: stored for each in placed for stored in each.objects}
        return Changeset(tuple(handles), tuple(objects.values()))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the changes of {self._operator} in step {self._path.step} are persisted already")

    def _close(self) -> None:
        self._closed = True
        self._uploader.close_writer(self.log_id)

    def _discard(self, future: "Future[Placed]") -> None:
        if not future.cancelled() and future.exception() is None:
            self._uploader.discard(future.result())

    def _send(self) -> None:
        """Upload what is waiting as one segment."""
        builder = SegmentBuilder(self._operator, self._path.checkpoint, self._key_groups, self._uploader.checksums)
        sqn = self._path.step
        for change in self._waiting:
            if isinstance(change, OpaqueChange):
                builder.add_opaque(change.variable, change.values, change.previous_checkpoint)
            elif isinstance(change, WholeTable):
                builder.add_base(change.variable, change.stored, change.rows, digest=change.digest, sqn=sqn)
            else:
                previous = change.previous_checkpoint, change.previous_entry
                builder.add_delta(change.variable, change.block, *previous, digest=change.digest, sqn=sqn)
        self._waiting = []
        self._sent.append(self._uploader.submit(self._path, builder.build()))
