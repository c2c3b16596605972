"""Before-images: what keys of the database had before a change, so that a step can be undone."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from siltstone.state.backends.rocksdb.database import AtomicWrite
from siltstone.state.backends.rocksdb.packing import Packed, to_list


@dataclass(frozen=True)
class Image:
    """Keys of the database, and their values before a change; null if they had none."""

    keys: Packed
    values: Packed

    def pack(self) -> bytes:
        """Return the image as one value of the database."""
        return pack_strings([self.keys, self.values])

    @classmethod
    def unpack(cls, data: bytes) -> "Image":
        """Undo `pack`."""
        return cls(*unpack_strings(data))

    def undo(self, changes: AtomicWrite) -> None:
        """Bring the keys back to what they were."""
        there = self.values.is_valid()
        changes.put(to_list(self.keys.filter(there)), to_list(self.values.drop_null()))
        changes.delete(to_list(self.keys.filter(pa.compute.invert(there))))  # pyright: ignore[reportAttributeAccessIssue]


def pack_strings(columns: Sequence[Packed]) -> bytes:
    """Return equally long columns of byte strings as Arrow IPC."""
    batch = pa.record_batch(list(columns), names=[str(i) for i in range(len(columns))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def unpack_strings(data: bytes) -> list[Packed]:
    """Undo `pack_strings`."""
    batch = pa.ipc.open_stream(data).read_next_batch()
    return list(batch.columns)
