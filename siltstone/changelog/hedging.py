"""Hedging: send a request again if it is slower than most recent ones, and use the first answer (FLIP-158).

    HedgeRule     decides the delay, and whether the budget allows a hedge; without clock or threads
    Hedger        sends requests and hedges on threads

Both requests create the same name, if absent, with the same bytes. The second one finds the object and writes nothing.
If the object is deleted before the store has begun the second one, an object remains that nothing refers to, under its
checkpoint's name, where a sweep finds it.
"""

import queue
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

from siltstone.changelog.streamed_upload import NotAnswered, StreamedUpload, UploadWriter
from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.upload_retries import Upload, UploadRetries
from siltstone.errors import ObjectExists
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.retry import Data, Retrying, find_stored

WINDOW = 1000
"""number of recent requests per size class from which the quantile is computed"""
_SMALL_BITS = 18
_BURST = 20


class HedgeRule:
    """Decides when to send a request again. Not thread-safe.

    The delay is a quantile of the seconds that the last `WINDOW` requests of the size class took. Sizes up to 256 KiB
    are one class, because there the round trip takes most of the time; above that, each power of two is a class.

    A hedged request counts with the seconds until its first answer. If that was the hedge's answer, its own time is
    unknown (censored), but above the delay and so above the quantile: its rank is right, which is all that a quantile
    uses, and the delay does not drift down. If the whole store becomes slower, most requests exceed the old delay; the
    budget allows few hedges, the other requests show their true time, and the delay grows.

    The budget is a token bucket: after n requests, at most `budget * n` hedges were sent. It has at most 20 tokens, so
    that a store that becomes slow after a long good time does not get many hedges at once.

    Args:
        quantile: a request that takes longer than this part of recent ones is hedged.
        budget: maximum hedges, as a fraction of all requests.
        min_samples: requests of a size class to have seen before any of it is hedged.
    """

    def __init__(self, quantile: float = 0.96, budget: float = 0.05, min_samples: int = 50) -> None:
        self._quantile = quantile
        share = Fraction(str(budget))
        self._earned, self._price = share.numerator, share.denominator
        self._tokens = 0
        self._min_samples = min(min_samples, WINDOW)
        self._recent: dict[int, deque[float]] = {}
        self._sorted: dict[int, list[float]] = {}

    def begin(self, size_bytes: int) -> float | None:
        """Begin a request; return the seconds after which to hedge it, or None before `min_samples` requests."""
        self._tokens = min(self._tokens + self._earned, _BURST * self._price)
        ordered = self._sorted.get(_size_class(size_bytes), [])
        if len(ordered) < self._min_samples:
            return None
        return ordered[int(self._quantile * len(ordered))]

    def spend(self) -> bool:
        """Take one hedge from the budget; return whether that was possible."""
        if self._tokens < self._price:
            return False
        self._tokens -= self._price
        return True

    def end(self, size_bytes: int, seconds: float) -> None:
        """Record that a request succeeded, by itself or by its hedge, after `seconds`."""
        size = _size_class(size_bytes)
        recent, ordered = self._recent.setdefault(size, deque()), self._sorted.setdefault(size, [])
        recent.append(seconds)
        insort(ordered, seconds)
        if len(recent) > WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]


def _size_class(size_bytes: int) -> int:
    return max(_SMALL_BITS, (size_bytes - 1).bit_length() if size_bytes else 0)


class _Twins:
    """The outcome of a request and of its hedge, if one was sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answered = threading.Event()
        self.running = 1
        self.hedged = False
        self.abandoned = False
        self.stored: StoredObject | None = None
        self.error: BaseException | None = None
        self.won_by_hedge = False

    def add_hedge(self) -> bool:
        """Count the hedge as running; return False if the request has been answered."""
        with self.lock:
            if self.answered.is_set():
                return False
            self.running += 1
            self.hedged = True
            return True

    def take_back_hedge(self) -> None:
        """Count the hedge as not running, because it could not be sent."""
        with self.lock:
            self.running -= 1
            if not self.running:
                self.answered.set()

    def abandon(self) -> bool:
        """Stop waiting; return False if the request has been answered."""
        with self.lock:
            if self.answered.is_set():
                return False
            self.abandoned = True
            return True

    def end(self, stored: StoredObject | None, error: BaseException | None, *, hedge: bool) -> bool:
        """Record how the request or its hedge ended; return False if the other one had answered before."""
        with self.lock:
            self.running -= 1
            if self.abandoned:
                return True
            if self.stored is not None:
                return False
            if stored is not None:
                self.stored, self.won_by_hedge = stored, hedge
            elif not hedge or self.error is None:
                self.error = error  # the request's own error says more than its hedge's
            if stored is not None or not self.running:
                self.answered.set()
            return True


class Hedger:
    """Stores objects with hedged requests; thread-safe.

    A request runs on one of the hedger's threads, so that its caller can return while it still hangs. It is retried
    until `UploadOptions.checkpoint_timeout_s` (`UploadRetries`); its hedge is one attempt. The slower of the two cannot
    be stopped: it keeps its bytes and its thread until it ends, and its answer is counted and ignored. If many threads
    hang, requests are not hedged.

    Args:
        rule: when to hedge, if `options.hedging`.
        threads: requests at a time, hedges included; by default four times `options.upload_threads`.
    """

    def __init__(
        self,
        store: Store,
        options: UploadOptions,
        metrics: UploadMetrics,
        rule: HedgeRule | None = None,
        *,
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retries = UploadRetries(store, options.checkpoint_timeout_s, metrics)
        self._hedging = options.hedging
        self._metrics = metrics
        self._clock = clock
        self._rule = rule or HedgeRule()
        self._lock = threading.Lock()
        self._threads = RequestThreads(threads or 4 * options.upload_threads)

    def put(self, name: str, data: Data) -> StoredObject:
        """Store a new object, as `Store.put` does, and return with the first answer.

        Raises:
            ObjectExists: an object of this name has other bytes.
            Unreachable: all attempts failed, or the store did not answer in time.
        """
        size_bytes = memoryview(data).nbytes
        self._metrics.count("requests")
        with self._lock:
            delay_s = self._rule.begin(size_bytes) if self._hedging else None
        began_s = self._clock()
        try:
            upload = self._retries.begin()
            stored = self._put_hedged(upload, name, data, delay_s)
        except BaseException:
            self._metrics.count("failures")
            raise
        seconds = self._clock() - began_s
        self._note_stored(size_bytes, seconds, upload)
        with self._lock:
            self._rule.end(size_bytes, seconds)
        return stored

    @contextmanager
    def create(self, name: str) -> Iterator[UploadWriter]:
        """Write a new object piece by piece; it appears complete when the block ends, or not at all on an error.

        One of at most `HELD_BYTES` is stored by `put`. A larger one is streamed, in bounded memory: each of the store's
        requests is retried like an upload of its own, and none is hedged.

        Raises:
            ObjectExists: the name is taken.
            Unreachable: all attempts of a request failed, or the store did not answer in time.
        """
        tried = list[Upload]()

        def begin() -> tuple[StreamedUpload, float]:
            stream, upload = self._begin_stream(name)
            tried.append(upload)
            return stream, upload.limit_s

        writer, began_s = UploadWriter(begin), self._clock()
        try:
            yield writer
            writer.closed = True
            if writer.upload is not None:
                writer.stored = writer.finish()
        except BaseException as error:
            if writer.upload is not None:
                self._metrics.count("failures")
                writer.upload.abort()
            if isinstance(error, NotAnswered):
                raise self._retries.give_up(name, error.limit_s) from None
            raise
        if writer.stored is None:
            writer.stored = self.put(name, memoryview(writer.held))
        else:
            self._note_stored(writer.stored.bytes, self._clock() - began_s, *tried)

    def close(self) -> None:
        """End idle threads; the others end after their requests."""
        self._threads.close()

    def _note_stored(self, size_bytes: int, seconds: float, upload: Upload) -> None:
        self._metrics.count_stored(size_bytes, seconds, upload.attempts)
        self._retries.note_success()

    def _begin_stream(self, name: str) -> tuple[StreamedUpload, Upload]:
        self._metrics.count("requests")
        stream, upload = StreamedUpload(), self._retries.begin()
        upload.note_attempt()
        self._threads.run(lambda: stream.run(upload.store, name))
        return stream, upload

    def _put_hedged(self, upload: Upload, name: str, data: Data, delay_s: float | None) -> StoredObject:
        twins, limit_s = _Twins(), upload.limit_s
        self._threads.run(lambda: self._send(twins, upload, name, data))
        waited_s = 0.0
        if delay_s is not None:
            waited_s = min(delay_s, limit_s)
            if not twins.answered.wait(waited_s) and self._may_hedge() and twins.add_hedge():
                if self._threads.try_run(lambda: self._send(twins, upload, name, data, hedge=True)):
                    self._metrics.count("hedges_sent")
                else:
                    twins.take_back_hedge()
        if not twins.answered.wait(limit_s - waited_s) and twins.abandon():
            raise self._retries.give_up(name, limit_s)
        if twins.stored is None:
            assert twins.error is not None
            raise twins.error
        if twins.won_by_hedge:
            self._metrics.count("hedges_won")
        return twins.stored

    def _may_hedge(self) -> bool:
        with self._lock:
            return self._rule.spend()

    def _send(self, twins: _Twins, upload: Upload, name: str, data: Data, *, hedge: bool = False) -> None:
        """Send one twin, to its end."""
        stored, failed, retrying = None, None, upload.store
        upload.note_attempt()
        try:
            stored = retrying.once.put(name, data) if hedge else retrying.put(name, data)
        except ObjectExists as error:
            stored, failed = self._of_twin(twins, retrying, name, data, error)
        except BaseException as error:
            failed = error
        if not twins.end(stored, failed, hedge=hedge):
            self._metrics.count("hedges_late")

    def _of_twin(
        self, twins: _Twins, retrying: Retrying, name: str, data: Data, error: ObjectExists
    ) -> tuple[StoredObject | None, BaseException | None]:
        """Find out who took the name: the other twin, whose answer is lost or late, if the object holds the same
        bytes."""
        if not twins.hedged:
            return None, error
        if twins.stored is not None:
            return twins.stored, None
        try:
            return retrying.policy.call(lambda: find_stored(retrying.once, name, data)), None
        except BaseException as worse:
            return None, worse


_NAME = "siltstone-upload"


class RequestThreads:
    """Daemon threads, made as they are needed. A process may end though some of them hang."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._threads = 0
        self._closed = False

    def run(self, task: Callable[[], None]) -> None:
        """Have a thread run `task` now, even if there are many: what its caller waits for must not wait for others."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._take_thread()
        if closed:
            threading.Thread(target=task, name=_NAME, daemon=True).start()
        else:
            self._tasks.put(task)

    def try_run(self, task: Callable[[], None]) -> bool:
        """Have a thread run `task` now; return False if none is free and no further one may be started."""
        with self._lock:
            if self._closed or (not self._free and self._threads >= self._most):
                return False
            self._take_thread()
        self._tasks.put(task)
        return True

    def close(self) -> None:
        """End the threads that are free, and the others once they are."""
        with self._lock:
            threads = 0 if self._closed else self._threads
            self._closed = True
        for _ in range(threads):
            self._tasks.put(None)

    def _take_thread(self) -> None:
        if self._free:
            self._free -= 1
        else:
            self._threads += 1
            threading.Thread(target=self._work, name=_NAME, daemon=True).start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds the object's bytes
            with self._lock:
                if self._threads > self._most:
                    self._threads -= 1
                    return
                self._free += 1
