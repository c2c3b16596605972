"""Read Arrow IPC streams from a store without trusting them: Arrow itself trusts their lengths and offsets.

A stream's batches are read one by one. Before Arrow decompresses a batch, the lengths that its buffers claim are added
up; afterwards the whole batch is validated, before anything is read from it. Only plain batches are accepted: no
dictionaries, tensors or extension types.

The metadata of a message is a FlatBuffer, which Arrow verifies when it reads the message. pyarrow does not expose its
buffers, so they are looked up here (Arrow's `Message.fbs`).
"""

import struct
from collections.abc import Iterator

import pyarrow as pa

from siltstone.decoding import FREE_BYTES, decoded_bytes_max

_HEADER, _LENGTH, _NODES, _BUFFERS, _COMPRESSION = 2, 0, 1, 2, 3
_PAIR = struct.Struct("<qq")
_CLAIMED = struct.Struct("<q")


def ipc_options(batch: pa.RecordBatch) -> pa.ipc.IpcWriteOptions:
    """Return the options of a stream that begins with this batch: compressed, unless it is so large that a reader might
    refuse to decompress it."""
    return pa.ipc.IpcWriteOptions(compression="zstd" if is_small(batch) else None)


def is_small(batch: pa.RecordBatch) -> bool:
    """Whether a reader accepts a batch however well it compresses."""
    return batch.nbytes <= FREE_BYTES // 2


def read_batches(data: pa.Buffer | memoryview | bytes, schema: pa.Schema | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream, each validated.

    Args:
        schema: the schema that the stream must have, apart from metadata; None accepts any without dictionaries and
            extension types.

    Raises:
        ValueError, pa.ArrowException, OSError, struct.error: it is not such a stream. `decoding` translates these.
    """
    room = decoded_bytes_max(memoryview(data).nbytes)
    messages = iter(pa.ipc.MessageReader.open_stream(pa.BufferReader(data)))
    first = next(messages, None)
    if first is None or first.type != "schema":  # Arrow would read any message as a schema, and crash
        raise ValueError("it does not begin with a schema")
    stored = pa.ipc.read_schema(first)
    if schema is not None and not stored.equals(schema):
        raise ValueError(f"its columns are {stored.to_string(show_schema_metadata=False)[:120]!r}")
    for field in stored:
        _check_field(field)
    for message in messages:
        yield _read_message(message, stored, room)


def read_batch(data: pa.Buffer | memoryview | bytes, schema: pa.Schema, room: int) -> pa.RecordBatch:
    """Return the batch of a message by itself, validated, whose schema is known.

    Args:
        room: how many bytes of memory it may take.

    Raises:
        ValueError, pa.ArrowException, OSError, struct.error: it is not such a batch.
    """
    return _read_message(pa.ipc.read_message(pa.py_buffer(data)), schema, room)


def _read_message(message: pa.ipc.Message, schema: pa.Schema, room: int) -> pa.RecordBatch:
    if message.type != "record batch":
        raise ValueError(f"it contains a {message.type}")
    _check_claims(message, room)
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    return batch


def _check_field(field: pa.Field) -> None:
    """Refuse a column that cannot be read safely, its nested columns included.

    Raises:
        ValueError: values of its type are in a separate message, or are read by an extension's code; or its name is not
            UTF-8, which Arrow checks only when the name is used.
    """
    _ = field.name  # a UnicodeDecodeError is a ValueError
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        raise ValueError(f"it has a column of type {kind}")
    for i in range(kind.num_fields):
        _check_field(kind.field(i))


def _check_claims(message: pa.Message, room: int) -> None:
    """Raise ValueError if a batch would take more than `room` bytes, or has more rows than bits."""
    metadata, body = memoryview(message.metadata), memoryview(message.body or b"")
    batch = _reference(metadata, _field(metadata, _reference(metadata, 0), _HEADER))
    compressed = _field(metadata, batch, _COMPRESSION) != 0
    claimed = 0
    for at in _structs(metadata, batch, _BUFFERS):
        offset, length = _PAIR.unpack_from(metadata, at)
        if not 0 <= offset <= offset + length <= len(body):
            raise ValueError("a buffer is beyond its batch")
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
    """Return the position that an offset points to."""
    return at + struct.unpack_from("<I", data, at)[0]


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the position of a table's field; 0 if it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("its metadata is damaged")
    place = 4 + 2 * number
    if place + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return 0
    [offset] = struct.unpack_from("<H", data, vtable + place)
    return table + offset if offset else 0


def _structs(data: memoryview, table: int, number: int) -> range:
    """Return the positions of the pairs of numbers in a vector."""
    at = _field(data, table, number)
    if not at:
        return range(0)
    start = _reference(data, at)
    [count] = struct.unpack_from("<I", data, start)
    if start + 4 + count * _PAIR.size > len(data):
        raise ValueError("its metadata is damaged")
    return range(start + 4, start + 4 + count * _PAIR.size, _PAIR.size)
