"""Read and write the object that identifies a store's warehouse, and list the streams that have run in it.

Its size is fixed: one ranged read works in every kind of store. It contains its own checksum, because no other place
records one:

    "SILTSTONE WAREHOUSE 1 " | identity, 32 hex digits | " " | xxh3-64 of what precedes, 16 hex digits | newline
"""

import re
import socket
from contextlib import suppress

import xxhash

from siltstone.errors import CorruptObject, NewerFormat, ObjectExists, Unreachable, UsageError
from siltstone.store.base import Store
from siltstone.store.open import Warehouse
from siltstone.store.paths import ALL_EPOCHS, IDENTITY, stream_of_mark

_HEAD = b"SILTSTONE WAREHOUSE "
_FORMAT = b"1"
_PATTERN = re.compile(rb"SILTSTONE WAREHOUSE 1 ([0-9a-f]{32}) ([0-9a-f]{16})\n")
_BYTES = len(_HEAD) + 1 + 1 + 32 + 1 + 16 + 1


def encode_identity(identity: str) -> bytes:
    """Encode the identity object; `identity` is 32 hex digits."""
    body = _HEAD + _FORMAT + b" " + identity.encode() + b" "
    return body + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


def read_identity(store: Store) -> str | None:
    """Read the identity of a store's warehouse, 32 hex digits; None if the store has none.

    Raises:
        CorruptObject: the identity object is cut or altered.
        NewerFormat: a newer Siltstone wrote it.
        Unreachable: the store does not answer, or lists the object but does not return it.
    """
    size_bytes = dict(store.list(IDENTITY)).get(IDENTITY)
    if size_bytes is None:
        return None
    if size_bytes < _BYTES:
        raise _damaged_error(store)
    try:
        data = store.read_range(IDENTITY, 0, _BYTES).to_pybytes()
    except CorruptObject as error:
        raise Unreachable(
            f"{store.label} lists {IDENTITY} but does not return it: {error}", advice="try again"
        ) from error
    if data.startswith(_HEAD) and data[len(_HEAD) : len(_HEAD) + 2] not in (_FORMAT + b" ", b""):
        version = data[len(_HEAD) :].split(b" ")[0]
        if version.isdigit() and int(version) > int(_FORMAT):
            raise NewerFormat(f"{store.label} was made by a newer Siltstone (format {int(version)}): upgrade siltstone")
    found = _PATTERN.fullmatch(data)
    if found is None or encode_identity(found[1].decode()) != data:
        raise _damaged_error(store)
    return found[1].decode()


def write_identity(store: Store, identity: str) -> str:
    """Write the identity object unless it exists; return the identity that the store then has.

    Raises:
        CorruptObject, NewerFormat, Unreachable: see `read_identity`.
    """
    with suppress(ObjectExists):
        store.put(IDENTITY, encode_identity(identity))
        return identity
    found = read_identity(store)
    if found is None:
        raise Unreachable(f"{store.label} says that {IDENTITY} exists, but does not return it: try again")
    return found


def list_streams(store: Store) -> list[str]:
    """List the streams that have run in a store, by name, as the marks of their writer epochs show.

    Raises:
        Unreachable: the store does not answer.
    """
    return sorted({stream for name, _ in store.list(ALL_EPOCHS) if (stream := stream_of_mark(name)) is not None})


def _damaged_error(store: Store) -> CorruptObject:
    return CorruptObject(
        f"object {IDENTITY} in {store.label} is damaged",
        advice="check that it is the right store, and run `siltstone reidentify`",
    )


def check_on_this_machine(warehouse: Warehouse) -> None:
    """Check that a warehouse which is a directory is the same one here, where a worker of a cluster may have no such
    directory, or another: what it stored there, nobody else would find.

    Raises:
        UsageError: it is not.
        CorruptObject, NewerFormat, Unreachable: see `read_identity`.
    """
    if warehouse.remote or not warehouse.identity:
        return
    if read_identity(warehouse.store) != warehouse.identity:
        raise UsageError(
            f"{socket.gethostname()} does not have the warehouse {warehouse.label}, which is a directory of another "
            f"machine, or has lost its object {IDENTITY}",
            advice="use a warehouse that all machines reach: s3://, redis://, cassandra://, or a directory that they "
            "share; or run on a local master (--master 'local[*]')",
        )
