"""Write the durable short-term log, as FLIP-158 describes (`StateChangelogWriter`).

    writer.append(key_groups, change)       the change is not durable yet
    sqn = writer.last_appended_sqn()        later changes belong to a new changeset
    handle = writer.persist(after).result() all changes with a higher sequence number are durable
    writer.truncate(before)                 older changes are in a materialization and no longer needed

Sequence numbers are the logical time of one writer. Changes are kept until they are truncated, even if they are
durable: the checkpoint they were persisted for may be declined, and the next one then needs them, too. Changes that are
durable or being sent are not sent again, unless they failed.
"""

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from siltstone.changelog.changes import Change, ChangelogHandle, OpaqueChange, WholeTable
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Placed
from siltstone.errors import UsageError
from siltstone.format.segment import Segment, SegmentBuilder
from siltstone.model import Handle, KeyGroupRange, Kind
from siltstone.store.paths import CheckpointPath


class Uploads(Protocol):
    """The methods of `Uploader` that a writer uses."""

    options: UploadOptions
    checksums: str
    """algorithm of the checksums in handles"""
    opened: Callable[[str], None]
    done: Callable[[str], None]
    discard: Callable[[Placed], None]

    def submit(self, path: CheckpointPath, segment: Segment) -> "Future[Placed]":
        """Store a segment."""
        ...


@dataclass(eq=False)
class _Changeset:
    """What was appended under one sequence number, each variable once."""

    sqn: int
    changes: dict[str, Change | WholeTable | OpaqueChange] = field(default_factory=dict)
    upload: "_Upload | None" = None
    """the last that it went up with; it may have failed"""

    @property
    def size_bytes(self) -> int:
        return sum(change.size_bytes for change in self.changes.values())


@dataclass(eq=False)
class _Upload:
    """One segment: changesets that went up together."""

    future: "Future[Placed]"
    opaque_sqns: dict[str, int]
    to: int
    claims: int = 0
    """handles that refer to it, or will once all of them is durable"""
    unneeded: bool = False
    """all it holds was truncated, or its log has ended"""
    discarded: bool = False

    @property
    def failed(self) -> bool:
        return self.future.done() and (self.future.cancelled() or self.future.exception() is not None)

    def part(self) -> tuple[Handle, ...]:
        """Its handles, each with the sequence number of what it holds; the index with its last."""
        return tuple(
            handle
            if handle.kind is Kind.INCREMENTAL
            else replace(handle, sqn=self.opaque_sqns.get(handle.variable, self.to))
            for handle in self.future.result().handles
        )


class ChangelogWriter:
    """Logs the changes of one operator's key groups. `log_id` identifies it; `path` is the name for the next upload.

    Set `path` when the next checkpoint begins: changes that are stored before `persist` get that name. Use it from one
    thread at a time; futures complete on other threads.
    """

    def __init__(self, uploader: Uploads, operator: str, key_groups: KeyGroupRange, path: CheckpointPath) -> None:
        self.log_id = uuid.uuid4().hex
        self.path = path
        self._uploader = uploader
        self._operator = operator
        self._key_groups = key_groups
        self._active = _Changeset(1)
        self._finished: dict[int, _Changeset] = {}
        self._truncated = 0
        self._not_sent_bytes = 0
        self._uploads: list[_Upload] = []
        self._lock = threading.Lock()
        self._closed = False
        self._awaited = True
        uploader.opened(self.log_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, key_groups: KeyGroupRange, change: Change | WholeTable | OpaqueChange) -> None:
        """Log a change that is within `key_groups`.

        If more than `preemptive_persist_bytes` have not been sent, this sends them, and may block until the uploader
        has room. A variable's second change of a changeset begins a new changeset.

        Raises:
            UsageError: the key groups are not the writer's, or the writer is closed.
        """
        self._check_open()
        own = key_groups.intersect(self._key_groups)
        if own != key_groups or (change.spread and change.spread.intersect(own) != change.spread):
            raise UsageError(
                f"a change of {change.variable} for key groups {key_groups.start} to {key_groups.end} cannot be logged "
                f"by {self._operator}'s writer of {self._key_groups.start} to {self._key_groups.end}"
            )
        if not self._awaited:
            self._awaited = True
            self._uploader.opened(self.log_id)
        if change.variable in self._active.changes:
            self._finish_changeset()
        self._active.changes[change.variable] = change
        self._not_sent_bytes += change.size_bytes
        if self._not_sent_bytes > self._uploader.options.preemptive_persist_bytes:
            self._finish_changeset()
            self._send([changeset for changeset in self._finished.values() if changeset.upload is None])

    def last_appended_sqn(self) -> int:
        """Return the sequence number of the newest change, 0 before the first; later changes get higher ones."""
        self._finish_changeset()
        return self._active.sqn - 1

    def persist(self, after: int) -> "Future[ChangelogHandle]":
        """Make all changes with sequence numbers above `after` durable.

        Changes that are stored or being sent are reused; the others, and those that failed, are sent as one segment.
        The future fails if any upload fails; the next `persist` tries again.

        Raises:
            UsageError: some of the changes were truncated, or the writer is closed.
        """
        self._check_open()
        to = self.last_appended_sqn()
        if not self._truncated - 1 <= after <= to:
            raise UsageError(
                f"log {self.log_id} has changes {max(1, self._truncated)} to {to}: "
                f"it cannot persist those after {after}"
            )
        wanted = [changeset for sqn, changeset in self._finished.items() if sqn > after]
        missing = [changeset for changeset in wanted if changeset.upload is None or changeset.upload.failed]
        if missing:
            self._send(missing)
        self._uploader.done(self.log_id)
        self._awaited = False
        uploads = list(dict.fromkeys(changeset.upload for changeset in wanted if changeset.upload is not None))
        return self._combined(after, to, uploads)

    def truncate(self, before: int) -> None:
        """Drop changes with sequence numbers below `before`; they cannot be persisted again. Handles stay valid.

        Raises:
            UsageError: some of these changes do not exist yet.
        """
        last = self.last_appended_sqn()
        if before > last + 1:
            raise UsageError(f"log {self.log_id} cannot be truncated before {before}: its last change is {last}")
        for sqn in [sqn for sqn in self._finished if sqn < before]:
            changeset = self._finished.pop(sqn)
            if changeset.upload is None:
                self._not_sent_bytes -= changeset.size_bytes
        self._truncated = max(self._truncated, before)
        needed = {changeset.upload for changeset in self._finished.values()}
        unneeded = [upload for upload in self._uploads if upload not in needed]
        self._uploads = [upload for upload in self._uploads if upload in needed]
        for upload in unneeded:
            self._drop(upload)

    def close(self) -> None:
        """End the log, and delete stored changes that are in no handle, on best effort. Futures complete as usual."""
        if self._closed:
            return
        self._closed = True
        self._uploader.done(self.log_id)
        for upload in self._uploads:
            self._drop(upload)
        self._uploads.clear()
        self._finished.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"log {self.log_id} is closed")

    def _finish_changeset(self) -> None:
        if self._active.changes:
            self._finished[self._active.sqn] = self._active
            self._active = _Changeset(self._active.sqn + 1)

    def _send(self, changesets: Sequence[_Changeset]) -> None:
        """Upload changesets as one segment."""
        segment, opaque_sqns = self._segment(changesets)
        future = self._uploader.submit(self.path, segment)
        upload = _Upload(future, opaque_sqns, changesets[-1].sqn)
        self._uploads.append(upload)
        for changeset in changesets:
            if changeset.upload is None:
                self._not_sent_bytes -= changeset.size_bytes
            changeset.upload = upload

    def _segment(self, changesets: Sequence[_Changeset]) -> tuple[Segment, dict[str, int]]:
        """A segment, and the sequence numbers of its opaque variables: only the newest value of each is stored."""
        builder = SegmentBuilder(self._operator, self.path.checkpoint, self._key_groups, self._uploader.checksums)
        opaque: dict[str, tuple[int, OpaqueChange]] = {}
        for changeset in changesets:
            for change in changeset.changes.values():
                if isinstance(change, OpaqueChange):
                    opaque[change.variable] = changeset.sqn, change
                elif isinstance(change, WholeTable):
                    builder.add_base(
                        change.variable, change.stored, change.rows, digest=change.digest, sqn=changeset.sqn
                    )
                else:
                    builder.add_delta(
                        change.variable,
                        change.block,
                        change.previous_checkpoint,
                        change.previous_entry,
                        digest=change.digest,
                        sqn=changeset.sqn,
                    )
        for variable, (_, change) in opaque.items():
            builder.add_opaque(variable, change.values)
        return builder.build(), {variable: sqn for variable, (sqn, _) in opaque.items()}

    def _combined(self, after: int, to: int, uploads: list[_Upload]) -> "Future[ChangelogHandle]":
        """One future of many: the handle once all are stored, or the first error once all have ended."""
        combined: Future[ChangelogHandle] = Future()
        left = len(uploads)
        with self._lock:
            for upload in uploads:
                upload.claims += 1

        def finish() -> None:
            try:
                parts = tuple(upload.part() for upload in uploads)
                stored = {o.name: o for upload in uploads for o in upload.future.result().objects}
                handle = ChangelogHandle(self._key_groups, after, to, parts, tuple(stored.values()))
            except BaseException as error:
                self._unclaim(uploads)
                combined.set_exception(error)
            else:
                combined.set_result(handle)

        def one_ended(_: "Future[Placed]") -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                finish()

        if not uploads:
            finish()
        for upload in uploads:
            upload.future.add_done_callback(one_ended)
        return combined

    def _unclaim(self, uploads: list[_Upload]) -> None:
        """A handle was not to be: what it would have referred to may go if it became unneeded meanwhile."""
        with self._lock:
            for upload in uploads:
                upload.claims -= 1
        for upload in uploads:
            if upload.unneeded:
                self._drop(upload)

    def _drop(self, upload: _Upload) -> None:
        """Discard what an unneeded upload stored, once it has, unless a handle refers to it or is about to."""
        upload.unneeded = True

        def ended(future: "Future[Placed]") -> None:
            with self._lock:
                if upload.claims or upload.discarded or upload.failed:
                    return
                upload.discarded = True
            self._uploader.discard(future.result())

        upload.future.add_done_callback(ended)
