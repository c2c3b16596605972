"""Staged outputs: the rows that a checkpoint hands to sinks, in the store from before its commit until after it.

Rows are an Arrow IPC stream, compressed with zstd: every type is kept exactly, and any Arrow reader can open one. A
task stages its own: what is large as objects, what is small inside its acknowledgement, for the driver to store.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa

from siltstone.errors import CorruptObject
from siltstone.model import StoredObject
from siltstone.store.base import Store

OBJECT_BYTES = 16 << 20
"""an object ends with the batch that makes it so large"""


@dataclass(frozen=True)
class Staged:
    """Rows that were staged: `rows` of them in `objects`, or, few of them, as an Arrow IPC stream in `inline`."""

    rows: int = 0
    objects: Sequence[StoredObject] = ()
    inline: bytes = b""


@dataclass
class OutputWriter:
    """Stages batches of one schema, in order; `finish` says where they are.

    Nothing is in memory but the object that is being made.

    Args:
        store: where they go.
        name: names the n-th object.
        schema: the rows'.
        inline_bytes: up to so many bytes together are no object.
    """

    store: Store
    name: Callable[[int], str]
    schema: pa.Schema
    inline_bytes: int
    _rows: int = 0
    _objects: list[StoredObject] = field(default_factory=list)
    _open: tuple[pa.BufferOutputStream, pa.RecordBatchStreamWriter] | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """One more batch.

        Raises:
            Unreachable: the store does not take it.
        """
        if not batch.num_rows:
            return
        if self._open is None:
            sink = pa.BufferOutputStream()
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._open = sink, pa.ipc.new_stream(sink, self.schema, options=options)
        sink, writer = self._open
        writer.write_batch(batch)
        self._rows += batch.num_rows
        if sink.tell() >= OBJECT_BYTES:
            self._store(self._closed())

    def finish(self) -> Staged:
        """All of it is staged, or, where `inline_bytes` are enough, handed over.

        Raises:
            Unreachable: the store does not take it.
        """
        last = self._closed()
        if last is not None and not self._objects and last.size <= self.inline_bytes:
            return Staged(self._rows, inline=last.to_pybytes())
        self._store(last)
        return Staged(self._rows, tuple(self._objects))

    def _closed(self) -> pa.Buffer | None:
        if self._open is None:
            return None
        sink, writer = self._open
        self._open = None
        writer.close()
        return sink.getvalue()

    def _store(self, data: pa.Buffer | None) -> None:
        if data is not None:
            self._objects.append(self.store.put(self.name(len(self._objects)), data))

    @classmethod
    def of(cls, store: Store, name: Callable[[int], str], parts: Sequence[bytes]) -> Self:
        """A writer of all the rows of some streams of one schema, which are to be an object."""
        writer = None
        for part in parts:
            with pa.ipc.open_stream(part) as stream:
                writer = writer or cls(store, name, stream.schema, inline_bytes=-1)
                for batch in stream:
                    writer.add(batch)
        assert writer is not None, "there is something to store"
        return writer


def read_output(store: Store, stored: StoredObject) -> Iterator[pa.RecordBatch]:
    """The rows of one staged object, verified as a whole before the first of them.

    Raises:
        CorruptObject: missing, cut or altered.
        Unreachable: the store does not answer.
    """
    data = store.read(stored)
    try:
        with pa.ipc.open_stream(data) as stream:
            yield from stream
    except (pa.ArrowInvalid, OSError) as error:
        raise CorruptObject(f"{stored.name} holds no staged rows: {str(error).splitlines()[0]}") from None
