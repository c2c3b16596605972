"""Retry calls that failed for a transient reason: fixed or exponential waits, a number of attempts, a time limit.

    RetryPolicy     how often, and how long
    Retrying        a `Store` that applies a policy to every call of another

A failed write may have happened, with its answer lost. The next attempt then finds the object: if it has the content
to be written, it is ours and the write has succeeded.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, Protocol, Self, TypeVar, runtime_checkable

import pyarrow as pa
import tenacity

from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import ObjectWriter, Remark, Store, Unfinished
from siltstone.store.checksums import checksum_of

Answer = TypeVar("Answer")
Data = bytes | memoryview | pa.Buffer


class RetryWatcher(Protocol):
    """Is told of the retries of a policy's calls, by the threads that make them."""

    def note_retry(self, error: Unreachable, attempts: int, seconds: float) -> None:
        """Note that a call failed and will be tried again: `attempts` were made, the first `seconds` ago."""
        ...

    def note_given_up(self) -> None:
        """Note that a call failed for a transient reason and will not be tried again."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is attempted, and how long to wait in between.

    Attributes:
        kind: `exponential` doubles the wait each time, with jitter; `fixed` keeps it; `none` makes one attempt.
        attempts: maximum attempts, including the first.
        wait_s: the first wait, in seconds.
        wait_max_s: the longest wait, in seconds.
        total_s: seconds after which no further attempt begins. Waits become shorter towards it, so that the last
            attempt begins shortly before.
        option: the option that sets `total_s`. If it is not empty, the error of a call that is given up says how long
            it was tried and names the option.
        watcher: is told of retries.
        now_s: a clock in seconds that never goes back.
        sleep: waits for some seconds.
    """

    kind: Literal["exponential", "fixed", "none"] = "exponential"
    attempts: int = 5
    wait_s: float = 0.1
    wait_max_s: float = 5.0
    total_s: float = 120.0
    option: str = ""
    watcher: RetryWatcher | None = field(default=None, compare=False)
    now_s: Callable[[], float] = field(default=time.monotonic, compare=False)
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)

    def with_timeout(self, timeout_s: float, option: str) -> Self:
        """Return this policy with any number of attempts until `timeout_s`, which `option` sets; `none` stays."""
        if self.kind == "none":
            return self
        return replace(self, attempts=sys.maxsize, total_s=timeout_s, option=option)

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function`, retrying after a transient `Unreachable`; return its result or raise its last error.

        Raises:
            Unreachable: the last attempt failed. It is transient if only attempts or time ran out and the policy has no
                `option`.
        """
        began_s, made = self.now_s(), 0
        try:
            for attempt in self._make_retrying(began_s):
                with attempt:
                    made += 1
                    return function()
        except Unreachable as error:
            if not error.transient:
                raise
            if self.watcher is not None:
                self.watcher.note_given_up()
            if not self.option:
                raise
            tried = f"tried {made} times in {self.now_s() - began_s:.0f} s"
            advice = f"raise {self.option} if the store may be away for longer"
            raise Unreachable(f"{error}; {tried}", advice=advice) from error
        raise AssertionError("tenacity either returns or raises")

    def put(self, store: Store, name: str, data: Data) -> StoredObject:
        """Call `Store.put` with retries; also succeed if an attempt whose answer was lost stored the object.

        Raises:
            ObjectExists: another writer took the name.
            Unreachable: the last attempt failed.
        """
        lost = False

        def attempt() -> StoredObject:
            nonlocal lost
            try:
                return store.put(name, data)
            except ObjectExists:
                if not lost:
                    raise
                return find_stored(store, name, data)
            except Unreachable as error:
                lost = lost or error.transient
                raise

        return self.call(attempt)

    def _make_retrying(self, began_s: float) -> tenacity.Retrying:
        waits = {
            "exponential": tenacity.wait_random_exponential(multiplier=self.wait_s, max=self.wait_max_s),
            "fixed": tenacity.wait_fixed(self.wait_s),
            "none": tenacity.wait_none(),
        }
        attempts = 1 if self.kind == "none" else self.attempts
        soon_s = min(self.wait_s, 0.1 * self.total_s)

        def left_s() -> float:
            return began_s + self.total_s - self.now_s()

        def tell(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if self.watcher is not None and isinstance(error, Unreachable):
                self.watcher.note_retry(error, state.attempt_number, self.now_s() - began_s)

        return tenacity.Retrying(
            wait=lambda state: min(waits[self.kind](state), max(0.0, left_s()) / 2),
            stop=lambda state: state.attempt_number >= attempts or left_s() <= soon_s,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, Unreachable) and error.transient),
            before_sleep=tell,
            sleep=self.sleep,
            reraise=True,
        )


@runtime_checkable
class RetryingWithin(Protocol):
    """A store that makes several requests within one call, and retries each of them."""

    policy: RetryPolicy

    def with_policy(self, policy: RetryPolicy) -> Store:
        """Return the same store, with another policy for the requests within a call."""
        ...


def find_stored(store: Store, name: str, data: Data) -> StoredObject:
    """Return the existing object `name` if it contains exactly `data`.

    Raises:
        ObjectExists: it has other contents, so another writer wrote it.
    """
    view = memoryview(data).cast("B")
    stored = StoredObject(name, len(view), checksum_of(view, store.checksums))
    try:
        store.read(stored)
    except CorruptObject:
        raise ObjectExists(
            f"object {name} in {store.label} already exists with other contents: objects are written once"
        ) from None
    return stored


class Retrying:
    """`store` with every call retried by `policy`."""

    def __init__(self, store: Store, policy: RetryPolicy) -> None:
        self.once = store
        """the store itself, with one attempt per call"""
        self.policy = policy
        self.url, self.label, self.ranged, self.checksums = store.url, store.label, store.ranged, store.checksums

    def __repr__(self) -> str:
        return f"Retrying({self.once!r})"

    def with_policy(self, policy: RetryPolicy) -> "Retrying":
        """Return the same store with another policy, also for the requests within its calls."""
        once = self.once
        return Retrying(once.with_policy(policy) if isinstance(once, RetryingWithin) else once, policy)

    def put(self, name: str, data: Data) -> StoredObject:
        """Store a new object, with retries."""
        return self.policy.put(self.once, name, data)

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write a new object piece by piece. The store itself retries pieces, which cannot be repeated here."""
        return self.once.create(name)

    def read(self, stored: StoredObject) -> pa.Buffer:
        """Read a whole object and verify it, with retries."""
        return self.policy.call(lambda: self.once.read(stored))

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Read part of an object without verifying it, with retries."""
        return self.policy.call(lambda: self.once.read_range(name, offset, length))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of objects. The store itself retries pages, since a listing cannot restart half way."""
        return self.once.list(prefix)

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """Return when objects were stored, with retries."""
        names = list(names)
        return self.policy.call(lambda: self.once.modified_at(names))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, with retries."""
        names = list(names)
        self.policy.call(lambda: self.once.delete(names))

    def list_unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """List unfinished writes; the store itself retries."""
        return self.once.list_unfinished(prefix)

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Free the space of unfinished writes, with retries."""
        unfinished = list(unfinished)
        self.policy.call(lambda: self.once.discard(unfinished))

    def check(self, *, writable: bool) -> None:
        """Check that the store can be used, with retries."""
        self.policy.call(lambda: self.once.check(writable=writable))

    def remarks(self) -> Sequence[Remark]:
        """Report how the store is configured and how full it is, with retries."""
        return self.policy.call(self.once.remarks)
