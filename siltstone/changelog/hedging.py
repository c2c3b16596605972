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
from collections.abc import Callable
from fractions import Fraction

from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import ObjectExists
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.retry import Data, Retrying, RetryPolicy, already_stored

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
    """

    def __init__(self, quantile: float, budget: float, min_samples: int) -> None:
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
    """A request and, perhaps, its hedge: what they came to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answered = threading.Event()
        self.running = 1
        self.hedged = False
        self.stored: StoredObject | None = None
        self.error: BaseException | None = None
        self.won_by_hedge = False

    def add_hedge(self) -> bool:
        """Count the hedge in, unless the answer is there by now."""
        with self.lock:
            if self.answered.is_set():
                return False
            self.running += 1
            self.hedged = True
            return True

    def take_back_hedge(self) -> None:
        """The hedge could not be sent."""
        with self.lock:
            self.running -= 1
            if not self.running:
                self.answered.set()

    def end(self, stored: StoredObject | None, error: BaseException | None, *, hedge: bool) -> bool:
        """One of them ended; false if the answer was there before."""
        with self.lock:
            self.running -= 1
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

    The request runs on one of the hedger's threads, so that `put` can return while it still hangs; the store's
    `RetryPolicy` retries it. Its hedge is one attempt. The slower of the two cannot be stopped: it keeps its bytes and
    its thread until it ends, and its answer is counted and ignored. If no thread is free, because many hang, requests
    run on the caller's thread and are not hedged.
    """

    def __init__(
        self,
        store: Store,
        options: UploadOptions,
        metrics: UploadMetrics,
        *,
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        retrying = store if isinstance(store, Retrying) else Retrying(store, RetryPolicy(kind="none"))
        self._store, self._policy = retrying.once, retrying.policy
        self._hedging = options.hedging and options.hedge_budget > 0
        self._metrics = metrics
        self._clock = clock
        self._rule = HedgeRule(options.hedge_quantile, options.hedge_budget, options.hedge_min_samples)
        self._lock = threading.Lock()
        self._pool = _Pool(threads or 4 * options.upload_threads)

    def put(self, name: str, data: Data) -> StoredObject:
        """Store a new object, as `Store.put` does, and return with the first answer.

        Raises:
            ObjectExists: an object of this name has other bytes.
            Unreachable: all attempts failed.
        """
        size_bytes = memoryview(data).nbytes
        self._metrics.count("requests")
        with self._lock:
            delay_s = self._rule.begin(size_bytes) if self._hedging else None
        began = self._clock()
        try:
            stored = self._twins(name, data, delay_s)
        except BaseException:
            self._metrics.count("failures")
            raise
        seconds = self._clock() - began
        self._metrics.stored(size_bytes, seconds)
        with self._lock:
            self._rule.end(size_bytes, seconds)
        return stored

    def close(self) -> None:
        """End idle threads; the others end after their requests."""
        self._pool.close()

    def _twins(self, name: str, data: Data, delay_s: float | None) -> StoredObject:
        twins = _Twins()
        if delay_s is None or not self._pool.run(lambda: self._send(twins, name, data)):
            self._send(twins, name, data)
        elif not twins.answered.wait(delay_s) and self._may_hedge() and twins.add_hedge():
            if self._pool.run(lambda: self._send(twins, name, data, hedge=True)):
                self._metrics.count("hedges_sent")
            else:
                twins.take_back_hedge()
        twins.answered.wait()
        if twins.stored is None:
            assert twins.error is not None
            raise twins.error
        if twins.won_by_hedge:
            self._metrics.count("hedges_won")
        return twins.stored

    def _may_hedge(self) -> bool:
        with self._lock:
            return self._rule.spend()

    def _send(self, twins: _Twins, name: str, data: Data, *, hedge: bool = False) -> None:
        """One twin, to its end."""
        stored, failed = None, None
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1

        try:
            if hedge:
                attempt()
                stored = self._store.put(name, data)
            else:
                stored = self._policy.put(self._store, name, data, attempt)
        except ObjectExists as error:
            stored, failed = self._of_twin(twins, name, data, error)
        except BaseException as error:
            failed = error
        self._metrics.count("attempts", attempts)
        self._metrics.count("retries", attempts - 1)
        if not twins.end(stored, failed, hedge=hedge):
            self._metrics.count("hedges_late")

    def _of_twin(
        self, twins: _Twins, name: str, data: Data, error: ObjectExists
    ) -> tuple[StoredObject | None, BaseException | None]:
        """The name was taken: by the other twin, whose answer may be lost or late, if it holds the same bytes."""
        if not twins.hedged:
            return None, error
        if twins.stored is not None:
            return twins.stored, None
        try:
            return already_stored(self._store, name, data), None
        except BaseException as worse:
            return None, worse


class _Pool:
    """Daemon threads, made as they are needed up to a number; a process may end though some of them hang."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._threads = 0
        self._closed = False

    def run(self, task: Callable[[], None]) -> bool:
        """Have a thread run `task` now; false if none is free and there are enough."""
        with self._lock:
            if self._closed:
                return False
            if self._free:
                self._free -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name="siltstone-upload", daemon=True).start()
            else:
                return False
        self._tasks.put(task)
        return True

    def close(self) -> None:
        """End the threads that are free, and the others once they are."""
        with self._lock:
            threads = 0 if self._closed else self._threads
            self._closed = True
        for _ in range(threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds the object's bytes
            with self._lock:
                self._free += 1
