"""What the suites of identities share: stores that stop or lie."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject
from siltstone.model import StoredObject
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.identity import read_identity
from siltstone.store.paths import IDENTITY


def identity_of(place: OpenWarehouse) -> str | None:
    """The identity that store and catalog agree on."""
    recorded = place.catalog.identity.read()
    assert recorded.next is None and recorded.identity == read_identity(place.warehouse.store)
    return recorded.identity


def stop_at_identity(patch: pytest.MonkeyPatch, *, after: bool) -> None:
    """Let the process stop right before the store's identity is written, or right after."""
    put = FilesystemStore.put

    def stopped(self: FilesystemStore, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        if name != IDENTITY or after:
            stored = put(self, name, data)
            if name != IDENTITY:
                return stored
        raise KeyboardInterrupt

    patch.setattr(FilesystemStore, "put", stopped)


def always() -> bool:
    """At any time."""
    return True


def answer_not_found(patch: pytest.MonkeyPatch, *, listed: bool = True, when: Callable[[], bool] = always) -> None:
    """Let the store say of every object that it is not there, while `when` says so; if not `listed`, in lists, too."""
    read, part, names = FilesystemStore.read, FilesystemStore.read_range, FilesystemStore.list

    def check(store: FilesystemStore, name: str) -> None:
        if when():
            raise CorruptObject(f"object {name} in {store.url} is missing")

    def read_all(self: FilesystemStore, stored: StoredObject) -> pa.Buffer:
        check(self, stored.name)
        return read(self, stored)

    def read_part(self: FilesystemStore, name: str, offset: int, length: int) -> pa.Buffer:
        check(self, name)
        return part(self, name, offset, length)

    patch.setattr(FilesystemStore, "read", read_all)
    patch.setattr(FilesystemStore, "read_range", read_part)
    if not listed:
        patch.setattr(FilesystemStore, "list", lambda self, prefix: iter(()) if when() else names(self, prefix))
