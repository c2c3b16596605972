"""Staged outputs: a checkpoint's rows for sinks, in the store from before its commit until after their delivery.

Rows are an Arrow IPC stream, compressed with zstd: every type is kept exactly, and any Arrow reader can open it. For a
sink that is a table they are Parquet files, which become the table's own (`format.table_file`). A task stages its own
rows: many as objects, few inside its acknowledgement, as an Arrow IPC stream, for the driver to store.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import pyarrow as pa

from siltstone.decoding import translate_decode_errors
from siltstone.errors import CorruptObject, StateError
from siltstone.format.arrow import ipc_options, is_small, read_batches
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.retry import Data

T = TypeVar("T")
OBJECT_BYTES = 16 << 20
"""an object ends with the batch that makes it this large"""


class Puts(Protocol):
    """Stores new objects: a store, or an uploader that tries again for longer."""

    def put(self, name: str, data: Data) -> StoredObject:
        """Store a new object, as `Store.put` does."""
        ...


@dataclass(frozen=True)
class Staged:
    """Staged rows: `rows` of them in `objects` or, if they are few, as an Arrow IPC stream in `inline`."""

    rows: int = 0
    objects: Sequence[StoredObject] = ()
    inline: bytes = b""


@dataclass
class OutputWriter:
    """Stages batches of one schema, in order; `finish` returns where they are.

    Only the object being made is in memory.

    Args:
        store: stores the objects.
        name: returns the name of the n-th object.
        schema: the rows' schema.
        inline_bytes: rows of at most this many bytes are returned inline.
    """

    store: Puts
    name: Callable[[int], str]
    schema: pa.Schema
    inline_bytes: int
    _rows: int = 0
    _objects: list[StoredObject] = field(default_factory=list)
    _open: tuple[pa.BufferOutputStream, pa.RecordBatchStreamWriter] | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch.

        Raises:
            Unreachable: the store cannot be written.
        """
        if not batch.num_rows:
            return
        if self._open is not None and not is_small(batch):
            self._store(self._close_object())  # it begins a new object, which is not compressed
        if self._open is None:
            sink = pa.BufferOutputStream()
            self._open = sink, pa.ipc.new_stream(sink, self.schema, options=ipc_options(batch))
        sink, writer = self._open
        writer.write_batch(batch)
        self._rows += batch.num_rows
        if sink.tell() >= OBJECT_BYTES:
            self._store(self._close_object())

    def finish(self) -> Staged:
        """Stage the rest, or return all rows inline if `inline_bytes` are enough.

        Raises:
            Unreachable: the store cannot be written.
        """
        last = self._close_object()
        if last is not None and not self._objects and last.size <= self.inline_bytes:
            return Staged(self._rows, inline=last.to_pybytes())
        self._store(last)
        return Staged(self._rows, tuple(self._objects))

    def _close_object(self) -> pa.Buffer | None:
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
    def of(cls, store: Puts, name: Callable[[int], str], parts: Sequence[bytes]) -> Self:
        """Make a writer with all rows of several streams of one schema, to be stored as objects.

        Raises:
            StateError: one of the streams is damaged.
        """
        writer = None
        with translate_decode_errors("what a subtask staged", "staged rows", StateError):
            for part in parts:
                for batch in read_batches(part):
                    writer = writer or cls(store, name, batch.schema, inline_bytes=-1)
                    if batch.schema != writer.schema:
                        raise ValueError("its columns are not those of the other subtasks")
                    writer.add(batch)
        assert writer is not None, "there is something to store"
        return writer


def encode_inline(batches: Sequence[pa.RecordBatch], limit_bytes: int) -> bytes | None:
    """Return batches of one schema as an Arrow IPC stream of at most `limit_bytes`; None if it would be larger."""
    if any(not is_small(batch) for batch in batches):
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=ipc_options(batches[0])) as writer:
        for batch in batches:
            writer.write_batch(batch)
            if sink.tell() > limit_bytes:
                return None
    data = sink.getvalue()
    return data.to_pybytes() if data.size <= limit_bytes else None


def staged_schema(data: bytes) -> pa.Schema:
    """Decode the schema of an output's rows, as recorded in the catalog."""
    return pa.ipc.read_schema(pa.py_buffer(data))


def read_again(read: Callable[[], T]) -> T:
    """Call a function that reads staged objects; once more if one was damaged, since a store may answer wrongly once.

    Raises:
        CorruptObject: one was, both times.
    """
    with suppress(CorruptObject):
        return read()
    return read()


def read_output(store: Store, stored: StoredObject, schema: bytes | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one staged object; the object is verified first, and each batch before it is read.

    Args:
        schema: the schema recorded in the catalog, in Arrow's own format.

    Raises:
        CorruptObject: missing, cut or altered, or with another schema than recorded.
        Unreachable: the store does not answer.
    """
    yield from open_output(store, stored, schema)


def open_output(store: Store, stored: StoredObject, schema: bytes | None = None) -> Iterator[pa.RecordBatch]:
    """Like `read_output`, but read and verify the object in this call, and not when the first batch is asked for."""
    data = store.read(stored)

    def batches() -> Iterator[pa.RecordBatch]:
        with translate_decode_errors(f"object {stored.name}", "staged rows"):
            yield from read_batches(data, None if schema is None else staged_schema(schema))

    return batches()
