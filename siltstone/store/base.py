"""The store protocol: named objects, written once, durable on return, checked at every read (promise 6).

Two levels, as in the checkpoint data store of US 9471438: the name of an object is `<entry>/<key>`, where the entry,
all but the last part, is a checkpoint's. An entry is a directory of a file system, a prefix of a bucket, a Redis hash,
a RocksDB database; it comes to be with its first key and is gone with its last.
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
    """what was stored; None until the `with` block has ended well"""

    closed: bool

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        """Append bytes."""
        ...

    def flush(self) -> None:
        """Nothing is promised before the block ends."""
        ...


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A write that was begun and neither ended nor taken back, such as by a process that was killed.

    `token` means something to its store only. `name` is the object it was to be, None where that is not known.
    """

    token: str
    name: str | None
    began_at: datetime
    """in UTC"""


@dataclass(frozen=True, slots=True)
class Remark:
    """What people should know about a store that can be used. `advice` is what to do before it loses or refuses state;
    None where there is nothing to do."""

    found: str
    advice: str | None = None


@runtime_checkable
class Store(Protocol):
    """Objects by name. Names are relative, `/`-separated, and never leave the store (promise 8).

    Every call is one attempt; `store.retry` tries again what failed with a transient `Unreachable`. Safe for many
    threads and processes. Opening one does no I/O, and an open one can be sent to another process.
    """

    url: str
    """`open_store(url)` opens the same store again, on another machine too; may hold secrets: show `label` instead"""
    label: str
    """the store as people may see it: its URL without secrets"""
    ranged: bool
    """whether reading part of an object costs about the part: if not, what is read apart is better stored apart"""

    checksums: str
    """the algorithm of the checksums that it writes; it verifies all of them"""

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        """Store a new object: atomic, durable on return.

        Raises:
            ObjectExists: the name is taken; what is there stays as it is.
            Unreachable: the store is missing, read-only, full, or does not answer.
        """
        ...

    def create(self, name: str) -> AbstractContextManager[ObjectWriter]:
        """Write a new object piece by piece; it appears whole when the block ends, or not at all on an error."""
        ...

    def read(self, stored: StoredObject) -> pa.Buffer:
        """The whole object, its size and checksum verified.

        Raises:
            CorruptObject: missing, cut or altered; names the object and the reason.
            Unreachable: the store does not answer.
        """
        ...

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Exactly `length` bytes at `offset`, not verified: the caller knows their checksum.

        Raises:
            CorruptObject: the object is missing, or ends before; names it.
            Unreachable: the store does not answer.
        """
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every object whose name starts with `prefix`, in name order."""
        ...

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """When each object was stored, by the store's own clock, in UTC; without those that are not there.

        A store that keeps no times knows of none.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; a name that is not there is no error."""
        ...

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Writes of objects that never came to be and still take room; those still at work are among them.

        `prefix` selects by name; those of unknown name are always listed.
        """
        ...

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Free the room of unfinished writes; should one be at work after all, it fails and stores nothing."""
        ...

    def check(self, *, writable: bool) -> None:
        """Make sure that the store can be used before work begins; changes nothing that others see.

        Raises:
            UsageError: it is not there: a missing bucket or directory; says what to check.
            Unreachable: it does not answer, or refuses the credentials.
        """
        ...

    def remarks(self) -> Sequence[Remark]:
        """Report how the store is set up and how full it is, as far as it says so itself.

        Raises:
            Unreachable: it does not answer, or refuses the credentials.
        """
        ...
