"""What somebody who can write to the store, and knows our code, puts in the place of what is there: other bytes of the
same length, valid in every way that bytes can be valid by themselves: seals, inner checksums and indexes fit them.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from siltstone.format.base import read_base, write_base
from siltstone.format.block import decode_block, encode_block
from siltstone.format.index import encode_index
from siltstone.format.manifest import SEAL_BYTES, Manifest, encode_manifest
from siltstone.format.opaque import decode_opaque, encode_opaque
from siltstone.format.segment import Segment
from siltstone.model import Form
from siltstone.state.schema import TableSchema
from siltstone.store.base import Store
from siltstone.store.checksums import algorithm_of, checksum_of
from tests.stored import bare_statistics

_TRIES = 2000


def replace_object(store: Store, name: str, data: bytes) -> None:
    """Put other bytes in the place of an object, as its bucket lets anybody do who may write to it."""
    store.delete([name])
    store.put(name, data)


def _as_long(original: bytes, forged: Callable[[int], bytes]) -> bytes:
    """The first forgery that is as long as the original, and is another: lengths are recorded too."""
    for attempt in range(1, _TRIES):
        found = forged(attempt)
        if len(found) == len(original) and found != original:
            return found
    raise AssertionError(f"none of {_TRIES} forgeries has {len(original)} bytes")


def _altered(rows: pa.Table, column: str, by: int) -> pa.Table:
    """One number of a table is another: of a row in turn, by more and more."""
    values = rows.column(column).to_numpy().copy()
    values[by % len(values)] += 1 + by // len(values)
    field = rows.schema.field(column)
    return rows.set_column(rows.schema.get_field_index(column), field, pa.array(values, field.type))


def forged_block(original: bytes, column: str) -> bytes:
    """A delta's block with another number in a row."""
    changes, groups = decode_block(original, "a block")
    return _as_long(original, lambda by: encode_block(_altered(changes, column, by), groups).data)


def forged_segment(packed: bytes, column: str) -> bytes:
    """A segment with another number in a row of its one delta and in its opaque value, and the index of that."""
    segment = Segment.unpack(packed)
    incr, entries = bytearray(segment.incr), segment.entries()
    for i, entry in enumerate(entries):
        if entry.form is Form.DELTA:
            part = slice(entry.offset, entry.offset + entry.length)
            block = forged_block(bytes(incr[part]), column)
            incr[part] = block
            entries[i] = replace(entry, checksum=checksum_of(block, algorithm_of(entry.checksum)))
    index = encode_index(segment.checkpoint, entries)
    return replace(segment, incr=bytes(incr), non=forged_opaque(bytes(segment.non)), index=index).pack()


def forged_opaque(original: bytes) -> bytes:
    """Opaque values with another digit."""
    values = decode_opaque(original, "opaque values")
    return _as_long(
        original,
        lambda by: encode_opaque({g: re.sub(rb"[0-9]", b"%d" % (by % 10), v) for g, v in values.items()}),
    )


def forged_base(original: bytes, schema: TableSchema, column: str) -> bytes:
    """A base, or a table of a reference copy, with another number in a row."""
    parts = list(read_base(original, schema))
    rows, groups = pa.concat_tables([rows for rows, _ in parts]), np.concatenate([groups for _, groups in parts])

    def written(by: int) -> bytes:
        out = io.BytesIO()
        write_base(out, schema, [(_altered(rows, column, by), groups)])
        return out.getvalue()

    start = _footer(original)

    def both_altered(by: int) -> bytes:
        data = written(by)
        return data if _footer(data) == start and data[start:] != original[start:] else b""

    return _as_long(original, both_altered)


def parts_of_base(original: bytes, forged: bytes) -> Iterator[tuple[str, bytes]]:
    """(what was replaced, the base with it): its pages, its footer, all of it."""
    start = _footer(original)
    yield "pages", forged[:start] + original[start:]
    yield "footer", original[:start] + forged[start:]
    yield "all", forged


def _footer(data: bytes) -> int:
    """Where a Parquet file's footer begins."""
    return len(data) - 8 - pq.read_metadata(io.BytesIO(data)).serialized_size


def forged_manifest(original: bytes, manifest: Manifest) -> bytes:
    """A manifest that says that its first object has another checksum and its state another digest."""
    first, *others = manifest.objects
    digests = {
        op: {name: groups + (groups != 0).astype(np.uint64) for name, groups in of.items()}
        for op, of in manifest.digests.items()
    }
    # Wherever the checksum is, so that the manifest compresses as well as the original.
    checksum = checksum_of(b"forged", algorithm_of(first.checksum))
    handles = [replace(h, checksum=checksum) if h.checksum == first.checksum else h for h in manifest.handles]
    objects = [replace(each, ranges=None) for each in (replace(first, checksum=checksum), *others)]
    said = {
        "digests": digests,
        "objects": objects,
        "handles": handles,
        "statistics": bare_statistics(*manifest.operators),
    }
    forged = encode_manifest(replace(manifest, **said))
    # It is shorter, with fewer statistics and no checksums of ranges. The row is counted from its end, so it may be
    # preceded by anything.
    [head] = pa.ipc.open_stream(forged).read_all().to_pylist()
    at = len(forged) - SEAL_BYTES - json.loads(head["about"])["row"]
    assert len(forged) <= len(original)
    body = forged[:at] + bytes(len(original) - len(forged)) + forged[at:-SEAL_BYTES]
    return body + xxhash.xxh3_64_digest(body)


def forged_output(original: bytes, column: str) -> bytes:
    """Staged rows with another number in one of them."""
    rows = pa.ipc.open_stream(original).read_all()

    def written(by: int) -> bytes:
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
            stream.write_table(_altered(rows, column, by))
        return out.getvalue().to_pybytes()

    return _as_long(original, written)
