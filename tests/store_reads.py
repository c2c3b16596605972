"""Counts what is read from filesystem stores while a block runs, whoever opens them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from siltstone.model import StoredObject
from siltstone.store.filesystem import FilesystemStore


@dataclass
class Reads:
    """What was read: (object, offset, length in bytes) of each call, in order."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def bytes_of_state(self) -> int:
        """How many bytes there were, those of manifests apart."""
        return sum(length for name, _, length in self.calls if not name.endswith("manifest.arrow"))

    @property
    def names(self) -> set[str]:
        """Of the objects that were read from."""
        return {name for name, _, _ in self.calls}


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Count until the block ends; in this process."""
    reads = Reads()
    read, read_range = FilesystemStore.read, FilesystemStore.read_range

    def whole(self: FilesystemStore, stored: StoredObject) -> pa.Buffer:
        reads.calls.append((stored.name, 0, stored.bytes))
        return read(self, stored)

    def part(self: FilesystemStore, name: str, offset: int, length: int) -> pa.Buffer:
        reads.calls.append((name, offset, length))
        return read_range(self, name, offset, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilesystemStore, "read", whole)
        patch.setattr(FilesystemStore, "read_range", part)
        yield reads
