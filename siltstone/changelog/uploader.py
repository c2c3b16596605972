"""Upload segments in batches: segments that one process stores for a checkpoint at about the same time share objects.

This is the third level of batching of FLIP-158: a segment already has all variables of a subtask. A batch is sent after
`persist_delay_s`, or once its segments reach `size_threshold_bytes`, or once all open writers of the process have
submitted. In a store that can read parts of an object, a batch is one object of packed segments; in a key-value store
it is three objects, one per section.

Bases and manifests are objects of their own. They go through the uploader, too: hedged, retried and counted alike.
"""

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Self

from siltstone.changelog.hedging import Hedger
from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import ObjectExists, SiltstoneError, UsageError
from siltstone.format.coding import Bytes
from siltstone.format.segment import Places, Section, Segment
from siltstone.model import Handle, StoredObject
from siltstone.store.base import ObjectWriter, Store
from siltstone.store.open import open_store
from siltstone.store.paths import CheckpointPath, StepPath
from siltstone.store.retry import Data


class Sharers:
    """Counts the segments of a batch that are still needed."""

    def __init__(self, segments: int) -> None:
        self._left = segments
        self._lock = threading.Lock()

    def leave(self) -> bool:
        """Count one segment less; return whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0


@dataclass(frozen=True)
class Placed:
    """Where a segment is stored.

    Attributes:
        objects: the objects with its bytes; they may have other segments of the batch, too.
        handles: of its variables and tables, then of its index.
        batch: the names of all objects of its batch, and the number of segments that share them.
    """

    objects: tuple[StoredObject, ...]
    handles: tuple[Handle, ...]
    batch: tuple[tuple[str, ...], Sharers] = field(repr=False, compare=False)


@dataclass(frozen=True)
class _Request:
    segment: Segment
    size_bytes: int
    future: "Future[Placed]"


class _RequestBatch:
    """Requests that will share objects."""

    def __init__(self, path: CheckpointPath, deadline: float) -> None:
        self.path = path
        self.deadline = deadline
        self.requests: list[_Request] = []
        self.size_bytes = 0

    def add(self, request: _Request) -> None:
        self.requests.append(request)
        self.size_bytes += request.size_bytes


class Uploader:
    """Stores segments in batches, on `upload_threads` threads of its own; thread-safe.

    A batch is sent as soon as all writers that called `open_writer` have called `close_writer`, so a single writer
    never waits. `log` is the unique prefix of its objects' names.
    """

    def __init__(
        self,
        store: Store,
        options: UploadOptions,
        metrics: UploadMetrics | None = None,
        *,
        log: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.checksums = store.checksums
        self.options = options
        self.metrics = metrics or UploadMetrics()
        self.log = log or uuid.uuid4().hex
        self._hedger = Hedger(store, options, self.metrics, clock=clock)
        self._clock = clock
        lock = threading.RLock()
        self._lock, self._work, self._room = lock, threading.Condition(lock), threading.Condition(lock)
        self._awaited: set[str] = set()
        self._waiting: dict[CheckpointPath, _RequestBatch] = {}
        self._ready: deque[_RequestBatch] = deque()
        self._threads: list[threading.Thread] = []
        self._in_flight_bytes = 0
        self._blocked = 0
        self._sent = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_writer(self, writer: str) -> None:
        """Record that a writer will submit segments: batches wait for it."""
        with self._lock:
            self._awaited.add(writer)

    def close_writer(self, writer: str) -> None:
        """Record that a writer has submitted all its segments for now; ignored for a writer that is not open."""
        with self._lock:
            self._awaited.discard(writer)
            if not self._awaited:
                self.flush()

    def submit(self, path: CheckpointPath, segment: Segment) -> "Future[Placed]":
        """Store a segment under a checkpoint's name. Blocks while `in_flight_bytes` are waiting or being sent.

        The future returns where it is stored, or fails as `Store.put` does; then nothing of its batch is stored. A
        segment larger than the limit is sent alone.

        Raises:
            UsageError: the uploader is closed.
        """
        return self.submit_all(path, [segment])[0]

    def submit_all(self, path: CheckpointPath, segments: Sequence[Segment]) -> "list[Future[Placed]]":
        """Store segments like `submit`, in one batch as far as the limits allow."""
        requests = [_Request(s, sum(len(part) for part in s.sections.values()), Future()) for s in segments]
        with self._lock:
            for request in requests:
                request.future.set_running_or_notify_cancel()  # it cannot be cancelled: others share its objects
                self._wait_for_room(request.size_bytes)
                if self._closed:
                    raise UsageError("the uploader is closed: submit segments before closing it")
                self._in_flight_bytes += request.size_bytes
                self._start_threads()
                batch = self._waiting.get(path)
                if batch is None:
                    batch = self._waiting[path] = _RequestBatch(path, self._clock() + self.options.persist_delay_s)
                batch.add(request)
                if batch.size_bytes >= self.options.size_threshold_bytes:
                    self._ready.append(self._waiting.pop(path))
                queued = sum(len(b.requests) for b in (*self._waiting.values(), *self._ready))
                self.metrics.note_level(queued, self._in_flight_bytes)
                self._work.notify()
        return [request.future for request in requests]

    def put(self, name: str, data: Data) -> StoredObject:
        """Store an object of its own, such as a manifest, at once (`Hedger.put`)."""
        return self._hedger.put(name, data)

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write an object of its own, such as a base, piece by piece (`Hedger.create`)."""
        return self._hedger.create(name)

    def flush(self) -> None:
        """Send all waiting segments now."""
        with self._lock:
            self._ready.extend(self._waiting.values())
            self._waiting.clear()
            self._work.notify()

    def close(self) -> None:
        """Send all waiting segments, wait until they are stored or failed, and stop the threads."""
        self.flush()
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._room.notify_all()
        for thread in self._threads:
            thread.join()
        self._hedger.close()

    def discard(self, placed: Placed) -> None:
        """Discard a segment. Its objects are deleted, on best effort, once no segment that shares them is needed."""
        names, sharers = placed.batch
        if sharers.leave():
            self._delete(names)

    def _wait_for_room(self, size_bytes: int) -> None:
        def room() -> bool:
            return not self._in_flight_bytes or self._in_flight_bytes + size_bytes <= self.options.in_flight_bytes

        if room():
            return
        began = self._clock()
        self._blocked += 1  # what waits is sent at once while somebody waits for its room
        self._work.notify()
        self._room.wait_for(lambda: self._closed or room())
        self._blocked -= 1
        self.metrics.count_wait(self._clock() - began)

    def _start_threads(self) -> None:
        """Start one more thread, up to `upload_threads`: an uploader of few segments needs few."""
        if len(self._threads) < self.options.upload_threads:
            thread = threading.Thread(target=self._run, name=f"siltstone-batch-{self.log[:8]}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while (batch := self._take_batch()) is not None:
            self._send(batch)
            del batch  # it holds the segments' bytes

    def _take_batch(self) -> _RequestBatch | None:
        """Wait for the next batch to send; None once the uploader is closed and nothing is left."""
        with self._lock:
            while True:
                for path in [path for path, batch in self._waiting.items() if self._is_due(batch)]:
                    self._ready.append(self._waiting.pop(path))
                if self._ready:
                    batch = self._ready.popleft()
                    self._work.notify()  # another thread waits for the batches that are left
                    return batch
                if self._closed:
                    return None
                soonest = min((batch.deadline for batch in self._waiting.values()), default=None)
                self._work.wait(None if soonest is None else max(0.0, soonest - self._clock()))

    def _is_due(self, batch: _RequestBatch) -> bool:
        return self._closed or self._blocked > 0 or self._clock() >= batch.deadline

    def _send(self, batch: _RequestBatch) -> None:
        """Store a batch and answer its requests, and only these."""
        self.metrics.count_batch(len(batch.requests))
        segments = [request.segment for request in batch.requests]
        answers: list[Placed] = []
        error: BaseException | None = None
        try:
            with self._lock:
                self._sent += 1
                log = f"{self.log}-{self._sent}"
            objects, places = _layout(batch.path, log, segments, packed=self.store.ranged)
            stored = self._put(objects)
            batch_of = (tuple(stored), Sharers(len(segments)))
            for segment, place in zip(segments, places, strict=True):
                handles = tuple(segment.handles(place, self.checksums))
                own = {handle.object for handle in handles}
                answers.append(Placed(tuple(o for name, o in stored.items() if name in own), handles, batch_of))
        except BaseException as raised:
            error = raised
        with self._lock:
            self._in_flight_bytes -= batch.size_bytes
            self._room.notify_all()
        for i, request in enumerate(batch.requests):
            if error is not None:
                request.future.set_exception(error)
            else:
                request.future.set_result(answers[i])

    def _put(self, objects: Mapping[str, list[Bytes]]) -> dict[str, StoredObject]:
        """Store objects in order; if one cannot be stored, those before it go again, best effort."""
        stored: dict[str, StoredObject] = {}
        for name, parts in objects.items():
            try:
                stored[name] = self._hedger.put(name, b"".join(parts))
            except BaseException as error:
                ours = [] if isinstance(error, ObjectExists) else [name]  # its answer may be all that was lost
                self._delete((*stored, *ours))
                raise
        return stored

    def _delete(self, names: tuple[str, ...]) -> None:
        with suppress(SiltstoneError):  # a sweep finds what stays
            self.store.delete(names)


def _layout(
    path: CheckpointPath, log: str, segments: list[Segment], *, packed: bool
) -> tuple[dict[str, list[Bytes]], list[Places]]:
    """Return object name -> its parts, for the objects of a batch; and where each segment's sections begin.

    Unless `packed`, each section is an object. They are stored in the order NON, INCR, INDEX, so that everything an
    index points to is stored before it. A section that is empty in all segments gets no object: no handle points to it.
    """
    if packed:
        name, offset = path.segment(log), 0
        places, parts = [], []
        for segment in segments:
            places.append(segment.places(name, offset))
            parts.append(segment.pack())
            offset += len(parts[-1])
        return {name: parts}, places
    names = {section: path.segment(log, section.value) for section in Section}
    objects: dict[str, list[Bytes]] = {name: [] for name in names.values()}
    ends = dict.fromkeys(Section, 0)
    places = []
    for segment in segments:
        places.append({section: (names[section], ends[section]) for section in Section})
        for section, data in segment.sections.items():
            objects[names[section]].append(data)
            ends[section] += len(data)
    return {name: objects[name] for section, name in names.items() if ends[section]}, places


_uploaders: dict[tuple[str, str], Uploader] = {}
_uploaders_lock = threading.Lock()


def uploader_of(store_url: str, options: UploadOptions) -> Uploader:
    """Return this process's uploader for a store and options. It is made by the first call and lives with the process.

    A forked process makes uploaders of its own, because threads do not survive a fork.
    """
    key = (store_url, options.model_dump_json())
    with _uploaders_lock:
        if key not in _uploaders:
            _uploaders[key] = Uploader(open_store(store_url), options)
        return _uploaders[key]


def close_uploaders(store_url: str) -> None:
    """Close this process's uploaders for a store that is about to be removed, such as a temporary one."""
    with _uploaders_lock:
        closed = [_uploaders.pop(key) for key in list(_uploaders) if key[0] == store_url]
    for uploader in closed:
        uploader.close()


def _forget_uploaders() -> None:
    # Another thread may have held the lock when this process was forked.
    global _uploaders, _uploaders_lock
    _uploaders, _uploaders_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_uploaders)


class InliningUploader:
    """An uploader that keeps small segments, for the driver to store."""

    def __init__(self, uploader: Uploader, limit_bytes: int) -> None:
        self.options, self.checksums = uploader.options, uploader.checksums
        self.open_writer, self.close_writer, self.discard = (
            uploader.open_writer,
            uploader.close_writer,
            uploader.discard,
        )
        self.inline: list[bytes] = []
        self._uploader = uploader
        # Only a writer's last segment may be kept: the driver appends those after stored ones, and a table has the same
        # place in the index of each step. All segments before the last are larger than `preemptive_persist_bytes`.
        self._left_bytes = min(limit_bytes, uploader.options.preemptive_persist_bytes)
        """for all writers of the task: it has several where key groups are cut"""

    def submit(self, path: StepPath, segment: Segment) -> "Future[Placed]":
        """Store a segment, or keep it if it is small: then it has no place yet."""
        packed = segment.pack() if len(segment.non) + len(segment.incr) < self._left_bytes else b""
        if not packed or len(packed) > self._left_bytes:
            return self._uploader.submit(path, segment)
        self.inline.append(packed)
        self._left_bytes -= len(packed)
        future: Future[Placed] = Future()
        future.set_result(Placed((), (), ((), Sharers(1))))
        return future
