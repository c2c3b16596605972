"""The store protocol: named objects, written once, durable on return, checked at every read (promise 6)."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
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


@runtime_checkable
class Store(Protocol):
    """Objects by name. Names are relative, `/`-separated, and never leave the store (promise 8)."""

    url: str

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

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every object whose name starts with `prefix`, in name order."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; a name that is not there is no error."""
        ...
