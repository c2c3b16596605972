"""Arrow IPC streams of a store, read without trust: Arrow itself believes lengths and offsets that a stream tells it.

A stream's batches are read one by one. Before Arrow decompresses one, the lengths that its buffers claim to have are
added up; after it, everything in it is validated, before anything is read from it. Only plain batches are there: no
dictionaries, no tensors, no extension types.

The metadata of a message is a FlatBuffer, which Arrow verifies when it reads the message. pyarrow tells nothing of its
buffers, so they are looked up here (Arrow's `Message.fbs`).
"""

import struct
from collections.abc import Iterator

import pyarrow as pa

from siltstone.decoding import FREE_BYTES, room_for

_HEADER, _LENGTH, _NODES, _BUFFERS, _COMPRESSION = 2, 0, 1, 2, 3
_PAIR = struct.Struct("<qq")
_CLAIMED = struct.Struct("<q")


def ipc_options(batch: pa.RecordBatch) -> pa.ipc.IpcWriteOptions:
    """How a stream is written that begins with a batch: compressed, unless it is so large that a reader would refuse
    to decompress it where it compresses well."""
    return pa.ipc.IpcWriteOptions(compression="zstd" if is_small(batch) else None)


def is_small(batch: pa.RecordBatch) -> bool:
    """Whether a reader takes a batch however well it compresses."""
    return batch.nbytes <= FREE_BYTES // 2


def read_batches(data: pa.Buffer | memoryview | bytes, schema: pa.Schema | None = None) -> Iterator[pa.RecordBatch]:
    """The batches of a stream, each whole and validated.

    Args:
        schema: what the stream must have, metadata apart; None takes any without dictionaries and extension types.

    Raises:
        ValueError, pa.ArrowException, OSError, struct.error: it is no such stream. `decoding` turns that into our own.
    """
    room = room_for(memoryview(data).nbytes)
    messages = iter(pa.ipc.MessageReader.open_stream(pa.BufferReader(data)))
    first = next(messages, None)
    if first is None or first.type != "schema":  # Arrow takes any message for a schema, and dies of it
        raise ValueError("it does not begin with a schema")
    stored = pa.ipc.read_schema(first)
    if schema is not None and not stored.equals(schema):
        raise ValueError(f"its columns are {stored.to_string(show_schema_metadata=False)[:120]!r}")
    for field in stored:
        _check_field(field)
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"it holds a {message.type}")
        _check_claims(message, room)
        batch = pa.ipc.read_record_batch(message, stored)
        batch.validate(full=True)
        yield batch


def _check_field(field: pa.Field) -> None:
    """Refuse a column that cannot be read safely, its nested columns included.

    Raises:
        ValueError: the values of its type lie in a message of their own, or are read by an extension's code; or its
            name is not UTF-8, which Arrow checks only when the name is asked for.
    """
    _ = field.name  # a UnicodeDecodeError is a ValueError
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        raise ValueError(f"it has a column of type {kind}")
    for i in range(kind.num_fields):
        _check_field(kind.field(i))


def _check_claims(message: pa.Message, room: int) -> None:
    """ValueError where a batch would take more than `room` bytes, or has more rows than bits."""
    metadata, body = memoryview(message.metadata), memoryview(message.body or b"")
    batch = _reference(metadata, _field(metadata, _reference(metadata, 0), _HEADER))
    compressed = _field(metadata, batch, _COMPRESSION) != 0
    claimed = 0
    for at in _structs(metadata, batch, _BUFFERS):
        offset, length = _PAIR.unpack_from(metadata, at)
        if not 0 <= offset <= offset + length <= len(body):
            raise ValueError("a buffer lies beyond its batch")
        if not compressed or not length:
            claimed += length
            continue
        [size] = _CLAIMED.unpack_from(body, offset)
        if size < -1:
            raise ValueError("a buffer has a negative length")
        claimed += length if size == -1 else size
    if claimed > max(room, len(body)):
        raise ValueError(f"a batch of {len(body)} bytes would become {claimed}")
    at = _field(metadata, batch, _LENGTH)
    lengths = [_CLAIMED.unpack_from(metadata, at)[0] if at else 0]
    lengths += [_PAIR.unpack_from(metadata, at)[0] for at in _structs(metadata, batch, _NODES)]
    if not 0 <= min(lengths) <= max(lengths) <= 8 * claimed:
        raise ValueError(f"a batch of {claimed} bytes claims {max(lengths)} values")


def _reference(data: memoryview, at: int) -> int:
    """Where an offset leads to."""
    return at + struct.unpack_from("<I", data, at)[0]


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table lies, 0 where it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("its metadata is damaged")
    place = 4 + 2 * number
    if place + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return 0
    [offset] = struct.unpack_from("<H", data, vtable + place)
    return table + offset if offset else 0


def _structs(data: memoryview, table: int, number: int) -> range:
    """Where the pairs of numbers of a vector lie."""
    at = _field(data, table, number)
    if not at:
        return range(0)
    start = _reference(data, at)
    [count] = struct.unpack_from("<I", data, start)
    if start + 4 + count * _PAIR.size > len(data):
        raise ValueError("its metadata is damaged")
    return range(start + 4, start + 4 + count * _PAIR.size, _PAIR.size)
