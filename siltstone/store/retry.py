"""Tries again what failed for a passing reason: fixed or exponential waits, a number of attempts, a time limit.

    RetryPolicy     how often, how long
    Retrying        a `Store` that applies it to every call of another

A write that failed may have been carried out all the same, its answer lost. The next attempt then finds the object
there: if it is what was to be written, it was ours and the write has succeeded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

import pyarrow as pa
import tenacity

from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import ObjectWriter, Remark, Store, Unfinished
from siltstone.store.checksums import checksum_of

Answer = TypeVar("Answer")
Data = bytes | memoryview | pa.Buffer


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is made and how long it is waited in between.

    Attributes:
        kind: `exponential` doubles the wait each time, with jitter; `fixed` keeps it; `none` makes one attempt.
        attempts: how many, the first included.
        wait_s: the first wait.
        wait_max_s: the longest.
        total_s: no further attempt begins after so long.
    """

    kind: Literal["exponential", "fixed", "none"] = "exponential"
    attempts: int = 5
    wait_s: float = 0.1
    wait_max_s: float = 5.0
    total_s: float = 120.0

    def call(self, function: Callable[[], Answer], on_attempt: Callable[[], None] = lambda: None) -> Answer:
        """What `function` returns, or its last error; only a transient `Unreachable` makes it be called again."""
        for attempt in self._retrying():
            with attempt:
                on_attempt()
                return function()
        raise AssertionError("tenacity either returns or raises")

    def put(self, store: Store, name: str, data: Data, on_attempt: Callable[[], None] = lambda: None) -> StoredObject:
        """`Store.put`, tried again; succeeds too where an attempt was carried out whose answer was lost.

        Raises:
            ObjectExists: the name was taken by somebody else.
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
                return already_stored(store, name, data)
            except Unreachable as error:
                lost = lost or error.transient
                raise

        return self.call(attempt, on_attempt)

    def _retrying(self) -> tenacity.Retrying:
        waits = {
            "exponential": tenacity.wait_random_exponential(multiplier=self.wait_s, max=self.wait_max_s),
            "fixed": tenacity.wait_fixed(self.wait_s),
            "none": tenacity.wait_none(),
        }
        attempts = 1 if self.kind == "none" else self.attempts
        return tenacity.Retrying(
            wait=waits[self.kind],
            stop=tenacity.stop_any(tenacity.stop_after_attempt(attempts), tenacity.stop_after_delay(self.total_s)),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, Unreachable) and error.transient),
            reraise=True,
        )


def already_stored(store: Store, name: str, data: Data) -> StoredObject:
    """The object `name`, which is there, if it holds exactly `data`.

    Raises:
        ObjectExists: it holds something else, so somebody else wrote it.
    """
    view = memoryview(data).cast("B")
    stored = StoredObject(name, len(view), checksum_of(view, store.checksums))
    try:
        store.read(stored)
    except CorruptObject:
        raise ObjectExists(
            f"object {name} in {store.label} is already there with other contents: objects are written once"
        ) from None
    return stored


class Retrying:
    """`store` with every call tried again by `policy`, and whole in all else."""

    def __init__(self, store: Store, policy: RetryPolicy) -> None:
        self.once = store
        """the store itself: one attempt a call"""
        self.policy = policy
        self.url, self.label, self.ranged, self.checksums = store.url, store.label, store.ranged, store.checksums

    def __repr__(self) -> str:
        return f"Retrying({self.once!r})"

    def put(self, name: str, data: Data) -> StoredObject:
        """As `Store.put`."""
        return self.policy.put(self.once, name, data)

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """As `Store.create`. What was written in pieces cannot be written again from here: the store retries those."""
        return self.once.create(name)

    def read(self, stored: StoredObject) -> pa.Buffer:
        """As `Store.read`."""
        return self.policy.call(lambda: self.once.read(stored))

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """As `Store.read_range`."""
        return self.policy.call(lambda: self.once.read_range(name, offset, length))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """As `Store.list`; the store retries its pages, since a listing cannot begin again half way."""
        return self.once.list(prefix)

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """As `Store.modified_at`."""
        names = list(names)
        return self.policy.call(lambda: self.once.modified_at(names))

    def delete(self, names: Iterable[str]) -> None:
        """As `Store.delete`."""
        names = list(names)
        self.policy.call(lambda: self.once.delete(names))

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """As `Store.unfinished`."""
        return self.once.unfinished(prefix)

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """As `Store.discard`."""
        unfinished = list(unfinished)
        self.policy.call(lambda: self.once.discard(unfinished))

    def check(self, *, writable: bool) -> None:
        """As `Store.check`."""
        self.policy.call(lambda: self.once.check(writable=writable))

    def remarks(self) -> Sequence[Remark]:
        """As `Store.remarks`."""
        return self.policy.call(self.once.remarks)
