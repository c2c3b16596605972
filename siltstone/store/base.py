"""The store protocol: named objects, written once, durable on return, checked at every read (promise 6).

Names have two levels, as in the checkpoint data store of US 9471438: `<entry>/<key>`, where the entry, all but the last
part, belongs to a checkpoint. An entry is a directory of a file system, a prefix of a bucket, a Redis hash,
some partitions in Cassandra, or a RocksDB database; it appears with its first key and disappears with its last.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

import pyarrow as pa

from siltstone.model import StoredObject


class ObjectWriter(Protocol):
    """A file-like sink for one new object; pyarrow writers accept it."""

    stored: StoredObject | None
    """what was stored; None until the `with` block has succeeded"""

    closed: bool

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        """Append bytes."""
        ...

    def flush(self) -> None:
        """Do nothing: data is durable only once the block ends."""
        ...


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A write that was begun and neither finished nor aborted, for example because its process was killed.

    `token` has a meaning only for its store. `name` is the name of its object, None if not known.
    """

    token: str
    name: str | None
    began_at: datetime
    """in UTC"""


@dataclass(frozen=True, slots=True)
class Remark:
    """A note for people about a usable store. `advice` is what to do before it loses or refuses state, or None."""

    found: str
    advice: str | None = None


@runtime_checkable
class Store(Protocol):
    """Objects by name. Names are relative, `/`-separated, and never leave the store (promise 8).

    Every call is one attempt; `store.retry` retries calls that fail with a transient `Unreachable`. Safe for many
    threads and processes. Opening a store does no I/O, and an open one can be sent to another process.
    """

    url: str
    """`open_store(url)` opens the same store again, on any machine; may contain secrets: show `label` instead"""
    label: str
    """the store's name for people: its URL without secrets"""
    ranged: bool
    """whether reading part of an object costs only that part; if not, parts are better stored as separate objects"""

    checksums: str
    """the algorithm of new checksums; checksums of all algorithms are verified"""

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        """Store a new object: atomic, durable on return.

        Raises:
            ObjectExists: the name is taken; the existing object is not changed.
            Unreachable: the store is missing, read-only, full, or does not answer.
        """
        ...

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write a new object piece by piece; it appears complete when the block ends, or not at all on an error."""
        ...

    def read(self, stored: StoredObject) -> pa.Buffer:
        """Read a whole object and verify its size and checksum.

        Raises:
            CorruptObject: missing, cut or altered; the message names the object and the reason.
            Unreachable: the store does not answer.
        """
        ...

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Read exactly `length` bytes at `offset`, without verifying them: the caller knows their checksum.

        Raises:
            CorruptObject: the object is missing or too short; the message names it.
            Unreachable: the store does not answer.
        """
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every object whose name starts with `prefix`, in name order."""
        ...

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """Return when each existing object was stored, by the store's clock, in UTC.

        A store that keeps no times returns none.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is no error."""
        ...

    def list_unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """List unfinished writes that still take space, including writes in progress.

        `prefix` selects by name; writes of unknown name are always listed.
        """
        ...

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Free the space of unfinished writes; a write still in progress fails and stores nothing."""
        ...

    def check(self, *, writable: bool) -> None:
        """Check that the store can be used, before work begins; change nothing that others see.

        Raises:
            UsageError: its bucket or directory does not exist.
            Unreachable: it does not answer, or refuses the credentials.
        """
        ...

    def remarks(self) -> Sequence[Remark]:
        """Report how the store is configured and how full it is, as far as it provides this.

        Raises:
            Unreachable: it does not answer, or refuses the credentials.
        """
        ...
