"""Copy objects from one store to another, of any kind, verified on the way (objects are verified at every read)."""

from dataclasses import replace

from siltstone.errors import CorruptObject, ObjectExists
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import compare, start_hash
from siltstone.store.ranged import MEASURED_BYTES, with_ranges


def copy_object(source: Store, stored: StoredObject, target: Store, name: str) -> StoredObject:
    """Copy an object to another store under a name; an object that is there already is verified instead.

    At most `MEASURED_BYTES` are in memory at once. The copy keeps the checksums of the original.

    Raises:
        CorruptObject: the original is missing, cut or altered; there is no copy.
        ObjectExists: the name is taken by other contents.
        Unreachable: one of the stores failed.
    """
    copied = replace(stored, name=name)
    try:
        if stored.bytes <= MEASURED_BYTES:
            target.put(name, source.read(stored))
        else:
            _copy_in_parts(source, stored, target, name)
    except ObjectExists:
        check_copy(target, copied)
    return copied


def check_copy(store: Store, stored: StoredObject) -> None:
    """Read an object that an earlier copy has left, and compare it with its checksum.

    Raises:
        ObjectExists: it has other contents.
        Unreachable: the store failed.
    """
    try:
        verify_object(store, stored)
    except CorruptObject as error:
        raise ObjectExists(f"object {stored.name} in {store.label} has other contents: {error}") from error


def verify_object(store: Store, stored: StoredObject) -> None:
    """Read an object and compare it with its checksum, a part at a time.

    Raises:
        CorruptObject: it is missing, cut or altered.
        Unreachable: the store failed.
    """
    with_ranges(store, replace(stored, ranges=None))


def _copy_in_parts(source: Store, stored: StoredObject, target: Store, name: str) -> None:
    what = f"object {stored.name}"
    found = start_hash(stored.checksum, what)
    with target.create(name) as out:
        for start in range(0, stored.bytes, MEASURED_BYTES):
            part = source.read_range(stored.name, start, min(MEASURED_BYTES, stored.bytes - start))
            found.update(memoryview(part))
            out.write(part)
        compare(found, stored.checksum, what)  # in the block: a copy that does not match never appears
