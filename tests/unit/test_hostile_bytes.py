"""Bytes that somebody crafted, checksums and all: an error that names the object, before they take memory or a process.

`tests/fuzz` looks for what nobody thought of; here is what was found (issue 11, items 1 to 4).
"""

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import CorruptObject, StateError
from siltstone.format import block, opaque
from siltstone.format.base import KEY_GROUP, read_base
from siltstone.format.block import decode_block, encode_block
from siltstone.format.coding import Encoder, seal
from siltstone.format.index import decode_index, encode_index
from siltstone.format.manifest import HEAD, SCHEMA, SEAL_BYTES, Manifest, encode_manifest
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.format.opaque import decode_opaque
from siltstone.format.output import OutputWriter, read_output
from siltstone.model import MAX_ID, Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.merge import Delta, newest_changes
from siltstone.restore.plan_rules import Read
from siltstone.restore.restore import MemoryState, apply_reads
from siltstone.restore.tables import open_changes
from siltstone.state.schema import DELETED, TableSchema
from siltstone.store.blocks import BlockReader
from siltstone.store.filesystem import FilesystemStore
from tests.stored import bare_statistics

ROWS_OF_1_GB = 1 << 26
GROUPS = KeyGroupRange(0, 2)
TOTALS = TableSchema(
    pa.schema([pa.field("k", pa.int64(), nullable=False)]), pa.schema([]), pa.schema([("s", pa.string())])
)
CHECKSUM = "xxh3-128:" + "ab" * 16
BAD_NAMES = ["../../x", "/tmp/x", "..", "", "A", "a/b", "a\0", "a" * 65]


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """What the block allocates by Python, NumPy and Arrow stays below `size` bytes."""
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
        assert pool.bytes_allocated() - before < size
    finally:
        tracemalloc.stop()


SAID = bare_statistics("op", rows=1, parallelism=2)


def _manifest(**changed: Any) -> Manifest:
    shape = {"key": [["k", "int64"]], "subkey": [], "value": [["s", "string"]]}
    handle = Handle(
        "op", "totals", Kind.INCREMENTAL, Form.DELTA, "s/1/a.segment", 0, 9, CHECKSUM, GROUPS, 1, previous=1
    )
    plain = Manifest(
        stream="s",
        checkpoint=2,
        epoch=1,
        step=2,
        max_parallelism=2,
        operators={"op": {"key": [["k", "int64"]], "variables": {"totals": {"tables": {"totals": shape}}}}},
        handles=[handle],
        objects=[StoredObject("s/1/a.segment", 9, CHECKSUM)],
        digests={"op": {"totals": np.zeros(2, np.uint64)}},
        forms={"op": Form.DELTA},
        statistics=SAID,
        versions={"op": {"totals": [(0, 2)]}},
    )
    return replace(plain, **changed)


def _sealed(data: pa.Buffer) -> bytes:
    body = data.to_pybytes()
    return body + xxhash.xxh3_64_digest(body)


def _handle(**changed: Any) -> Manifest:
    return _manifest(handles=[replace(_manifest().handles[0], **changed)])


def _materialization(parts: list[KeyGroupRange], commit: tuple[bytes, ...] = (), **changed: Any) -> Manifest:
    base = replace(_manifest().handles[0], **{"form": Form.BASE, "previous": 0, **changed})
    handles = [replace(base, key_groups=part) for part in parts]
    return _manifest(materialization="x", versions={}, commit=commit, handles=handles)


def _renamed(name: str) -> list[Manifest]:
    """Manifests with a bad name in each place that has one."""
    plain = _manifest()
    shape = plain.operators["op"]["variables"]["totals"]["tables"]["totals"]
    return [
        replace(plain, stream=name),
        replace(plain, forms={**plain.forms, name: Form.BASE}),
        replace(plain, operators={**plain.operators, name: plain.operators["op"]}, forms={name: Form.BASE}),
        replace(
            plain,
            operators={"op": {"key": [["k", "int64"]], "variables": {"totals": {"tables": {name: shape}}}}},
            handles=[],
        ),
        _handle(object=f"s/1/{name}/../x"),
        _handle(operator=name),
        _handle(variable=name),
        replace(plain, digests={"op": {**plain.digests["op"], name: np.zeros(2, np.uint64)}}),
        replace(plain, objects=[StoredObject(f"{name}/../x", 1, CHECKSUM)]),
        replace(plain, materialization=f"{name}/x"),
    ]


def test_the_plain_manifests_of_these_tests_are_read() -> None:
    for plain in _manifest(), _materialization([GROUPS]), _materialization([KeyGroupRange(1, 2), KeyGroupRange(0, 1)]):
        assert decode_manifest(encode_manifest(plain)).handles == plain.handles


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_crafted_name_of_a_manifest_goes_no_further_than_its_decoder(name: str) -> None:
    """Issue 11, item 1b: operator and table names of a manifest became paths of an export."""
    for manifest in _renamed(name):
        with pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
            decode_manifest(encode_manifest(manifest), "s/1/m.arrow")


@pytest.mark.parametrize(
    "manifest",
    [
        _handle(form=Form.FILES),
        _manifest(max_parallelism=1 << 27),
        _manifest(max_parallelism=0),
        _manifest(max_parallelism=True),
        _manifest(checkpoint=0),
        _manifest(epoch=-1),
        _manifest(d={"op": 0.5}),
        _manifest(chains={"op": {"totals": {"first": 1, "deltas": "1"}}}),
        _manifest(step=MAX_ID + 1),
        _manifest(checkpoint=MAX_ID + 1),
        _manifest(digests={"op": {"totals": np.zeros(3, np.uint64)}}),
        _manifest(digests={}),
        _manifest(operators={}),
        _manifest(materialization="x", operators={}, handles=[]),
        _manifest(materialization="x"),
        _materialization([GROUPS], commit=(b"x",)),
        _materialization([GROUPS], form=Form.DELTA),
        _materialization([GROUPS], kind=Kind.INDEX),
        _materialization([KeyGroupRange(0, 1)]),
        _materialization([KeyGroupRange(1, 2)]),
        _materialization([GROUPS, KeyGroupRange(1, 2)]),
        _manifest(versions={}),
        _handle(offset=-1),
        _handle(length=(1 << 63) - 1, offset=1),
        _handle(rows=-1),
        _handle(previous=2),
        _handle(kind=Kind.OPAQUE),
        _handle(variable="others"),
        _handle(key_groups=KeyGroupRange(0, 3)),
        _handle(key_groups=KeyGroupRange(2, 1)),
    ],
)
def test_crafted_numbers_of_a_manifest_are_refused(manifest: Manifest) -> None:
    with pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
        decode_manifest(encode_manifest(manifest), "s/1/m.arrow")


@pytest.mark.parametrize("packed", [b"", b"\xab", bytes(17), b"\x09" + bytes(32), b"\x01" + bytes(31), bytes(33)])
def test_a_crafted_checksum_of_a_manifest_is_refused(packed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("siltstone.format.manifest.pack", lambda checksum: packed)
    crafted = encode_manifest(_manifest())
    with pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
        decode_manifest(crafted, "s/1/m.arrow")


def _with_head(text: str, row: bytes = b"") -> bytes:
    """Return a manifest with this head and this row."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, HEAD) as out:
        out.write_table(pa.table([[text]], schema=HEAD))
    body = sink.getvalue().to_pybytes() + row
    return body + xxhash.xxh3_64_digest(body)


def _with_row(message: bytes, **claimed: Any) -> bytes:
    """Return a manifest with this row, compressed if nothing else is claimed."""
    return _with_head(json.dumps({"format": 1, "row": len(message), "compression": "zstd", **claimed}), message)


def _row_of(manifest: bytes) -> bytes:
    """Return the message of a manifest's row."""
    body = manifest[:-SEAL_BYTES]
    [head] = pa.ipc.open_stream(body).read_all().to_pylist()
    return zstandard.decompress(body[-json.loads(head["about"])["row"] :])


def test_arrays_of_a_manifest_that_point_beyond_their_buffers_are_not_read() -> None:
    """Issue 11, item 2: reading them without validation ended the process."""
    row, offsets = _row_of(encode_manifest(_manifest())), struct.pack("<ii", 0, 1)
    assert decode_manifest(_with_row(row, compression="")).checkpoint == 2
    assert offsets in row, "each list has one value"
    altered = row.replace(offsets, struct.pack("<ii", 0, 1 << 30))
    for crafted in (_with_row(zstandard.compress(altered)), _with_row(altered, compression="")):
        with pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
            decode_manifest(crafted, "s/1/m.arrow")


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, '{"format":1}', "[]", "{", "1" * 5000, '{"format":[]}', '{"format":0}'),
        *(
            '{"format":1,"row":1}',
            '{"format":1,"row":"1","compression":""}',
            '{"format":true,"row":1,"compression":""}',
        ),
    ],
)
def test_crafted_json_of_a_manifest_is_corrupt(text: str) -> None:
    """Issue 11, item 4: RecursionError, KeyError and the like came out of decoders."""
    for crafted in (_with_head(text), _with_head(text, b"x"), _with_row(zstandard.compress(_message(1, text)))):
        with pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
            decode_manifest(crafted, "s/1/m.arrow")


def _message(count: int, text: str = "{}", compression: str | None = None) -> bytes:
    columns = [pa.array([v] * count, f.type) for v, f in zip([text, [], [], []], SCHEMA, strict=True)]
    batch = pa.record_batch(columns, schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
        out.write_batch(batch)
    [_, message] = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return message.serialize().to_pybytes()


@pytest.mark.parametrize(
    "crafted",
    [
        _with_row(b""),
        _with_row(b"no frame"),
        _with_row(b"no message", compression=""),
        _with_row(_message(1), compression="lz4"),
        _with_row(_message(1), compression=["zstd"]),
        _with_row(zstandard.compress(_message(1)), row=1 << 40),
        _with_row(zstandard.compress(_message(1)), row=-1),
        _with_row(zstandard.compress(b"")),
        _with_row(zstandard.compress(b"no message")),
        _with_row(zstandard.compress(_message(2))),
        _with_row(zstandard.compress(SCHEMA.serialize().to_pybytes())),
        _with_row(zstandard.ZstdCompressor(write_content_size=False).compress(_message(1))),
    ],
)
def test_a_crafted_row_of_a_manifest_is_corrupt(crafted: bytes) -> None:
    with pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
        decode_manifest(crafted, "s/1/m.arrow")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_row_that_claims_to_become_far_larger_is_not_decompressed(compression: str | None) -> None:
    crafted = _with_row(zstandard.compress(_message(1, "0" * (1 << 27), compression)))
    assert len(crafted) < 1 << 17
    with at_most(64 << 20), pytest.raises(CorruptObject, match=r"s/1/m\.arrow"):
        decode_manifest(crafted, "s/1/m.arrow")


def _compressed_zeros(size: int) -> bytes:
    sink, schema = pa.BufferOutputStream(), pa.schema([("n", pa.int64())])
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_batch(pa.record_batch([np.zeros(size // 8, np.int64)], schema=schema))
    return sink.getvalue().to_pybytes()


def test_arrow_data_that_claims_to_become_far_larger_is_not_decompressed(tmp_path: Path) -> None:
    crafted = _compressed_zeros(1 << 29)
    assert len(crafted) < 1 << 17
    store = FilesystemStore(tmp_path)
    with at_most(64 << 20):
        with pytest.raises(CorruptObject, match="a manifest"):
            decode_manifest(crafted + xxhash.xxh3_64_digest(crafted))
        with pytest.raises(CorruptObject, match=r"s/1/o\.output\.arrow"):
            list(read_output(store, store.put("s/1/o.output.arrow", crafted)))


def test_staged_rows_that_compress_too_well_are_read_all_the_same(tmp_path: Path) -> None:
    schema, store = pa.schema([("n", pa.int64())]), FilesystemStore(tmp_path)
    writer = OutputWriter(store, lambda n: f"s/1/o{n}", schema, inline_bytes=0)
    sizes = [10, (40 << 20) // 8, 5]
    for size in sizes:
        writer.add(pa.record_batch([np.zeros(size, np.int64)], schema=schema))
    batches = [batch for stored in writer.finish().objects for batch in read_output(store, stored)]
    assert [batch.num_rows for batch in batches] == sizes


def test_staged_rows_of_another_schema_are_corrupt(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    stored = store.put("s/1/o.output.arrow", _compressed_zeros(80))
    other = pa.schema([("n", pa.string())]).serialize().to_pybytes()
    with pytest.raises(CorruptObject, match=r"s/1/o\.output\.arrow"):
        list(read_output(store, stored, other))


def _constant_block(rows: int) -> bytes:
    """A block of one column whose values are all the same, as a crafted one claims them."""
    out = Encoder()
    out.varints([rows, 0, 1, 0])
    out.blob(json.dumps([["k", "int64", 0]]).encode())
    out.constant(rows, 0)
    out.constant(1, 0)
    out.constant(7, 0)
    return seal(out.finish(), block.MAGIC)


def test_a_block_of_few_bytes_does_not_take_a_gigabyte() -> None:
    """Issue 11, item 3: one of 53 bytes took 1.2 GB."""
    crafted = _constant_block(ROWS_OF_1_GB)
    assert len(crafted) < 100
    with at_most(64 << 20), pytest.raises(CorruptObject, match="far more memory"):
        decode_block(crafted, "s/1/x")
    with at_most(1 << 20), pytest.raises(CorruptObject, match="3 are recorded"):
        decode_block(crafted, "s/1/x", rows=3)
    assert len(decode_block(_constant_block(1000), "s/1/x", rows=1000)[0]) == 1000


def test_a_block_that_takes_all_the_memory_it_may_takes_less_than_256_mb() -> None:
    with at_most(256 << 20):
        decode_block(_constant_block((64 << 20) // 24))


@pytest.mark.slow
def test_a_block_that_compresses_too_well_is_read_all_the_same() -> None:
    rows = 6_000_000
    changes = pa.table({"k": np.arange(rows), "n": np.zeros(rows, np.int64)})
    data = encode_block(changes, np.zeros(rows, np.uint16)).data
    assert decode_block(data, rows=rows)[0].column("k").to_numpy()[-1] == rows - 1


def _sealed_opaque(write: Callable[[Encoder], None]) -> bytes:
    out = Encoder()
    write(out)
    return seal(out.finish(), opaque.MAGIC)


def test_an_opaque_value_reserves_nothing_for_what_it_claims() -> None:
    """Issue 11, item 3: one of 29 bytes reserved for 2^27 key groups."""
    crafted = [
        _sealed_opaque(lambda out: out.varints([1 << 27, 1])),
        _sealed_opaque(lambda out: out.varints([2, 3, (1 << 27) - 2])),
        _sealed_opaque(lambda out: out.varints([1, (1 << 40) << 1, 0, 0, 0])),
    ]
    for data in crafted:
        with at_most(1 << 20), pytest.raises(CorruptObject, match="s/1/x"):
            decode_opaque(data, "s/1/x")


def test_strings_of_a_block_that_are_no_utf_8_are_corrupt() -> None:
    data = bytearray(encode_block(pa.table({"k": ["abc"]}), np.zeros(1, np.uint16)).data)
    at = data.index(b"abc")
    data[at] = 0xFF
    altered = bytes(data[8:-8])
    with pytest.raises(CorruptObject, match="s/1/x"):
        decode_block(seal(altered, block.MAGIC), "s/1/x")


def test_damaged_values_are_refused_exactly_if_one_of_them_is_wanted() -> None:
    """Values of a delta are decoded only if one of its changes is a key's newest."""
    schema = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("t", pa.string())]))

    def delta(keys: list[int], text: bytes) -> Delta:
        changes = pa.table({"k": keys, "t": ["abc"] * len(keys), DELETED: [False] * len(keys)}).cast(schema.changes)
        data = encode_block(changes, np.zeros(len(keys), np.uint16), compression=False).data
        assert data.count(b"abc") == len(keys)
        data = seal(data[8:-8].replace(b"abc", text), block.MAGIC)
        handle = Handle("o", "t", Kind.INCREMENTAL, Form.DELTA, "s/1/x", 0, len(data), "", GROUPS, len(keys), 1)
        return open_changes(handle, schema, [GROUPS], pa.py_buffer(data))

    damaged = delta([1, 2], b"a\xffc")
    [(rows, _)] = newest_changes([delta([1, 2, 3], b"new"), damaged], schema, GROUPS, 2)
    assert rows.column("t").to_pylist() == ["new"] * 3
    with pytest.raises(CorruptObject, match="s/1/x"):
        list(newest_changes([delta([1, 3], b"new"), damaged], schema, GROUPS, 2))


def test_an_index_whose_names_or_numbers_lead_elsewhere_is_corrupt() -> None:
    from siltstone.format.index import IndexEntry

    good = IndexEntry("t", Form.BASE, 0, 0, 0, 9, 1, CHECKSUM, 1, source="s/1/b.parquet")
    assert decode_index(encode_index(2, [good]))[1][0].source == "s/1/b.parquet"
    for changed in ({"variable": "../x"}, {"source": "../../x"}, {"source": "/x"}, {"length": (1 << 64) - 1}):
        with pytest.raises(CorruptObject, match="s/1/x"):
            decode_index(encode_index(2, [replace(good, **changed)]), "s/1/x")


@pytest.mark.parametrize("damage", ["text", "order", "null", "type", "twice"])
def test_a_base_that_holds_what_no_base_may_is_corrupt(damage: str) -> None:
    import pyarrow.parquet as pq

    groups: Any = pa.array([1, 0] if damage == "order" else [0, 1], pa.uint32() if damage == "type" else pa.uint16())
    keys = pa.array([None, 1] if damage == "null" else [1, 2], pa.int64())
    texts = pa.array([b"\xff", b"a"]).view(pa.string()) if damage == "text" else pa.array(["a", "b"])
    names = [KEY_GROUP, "k", "k" if damage == "twice" else "s"]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([groups, keys, keys if damage == "twice" else texts], names), sink)
    with pytest.raises(CorruptObject, match=r"s/1/b\.parquet"):
        list(read_base(sink.getvalue(), TOTALS, name="s/1/b.parquet"))


@pytest.mark.parametrize("data", [b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"receipt":1}', b"1" * 5000])
def test_a_crafted_acknowledgement_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(StateError, match="acknowledgement"):
        Acknowledgement.from_bytes(data)


def test_a_restore_reserves_nothing_for_rows_that_a_crafted_handle_claims(tmp_path: Path) -> None:
    many = (1 << 62) - 1
    handle = replace(_manifest().handles[0], form=Form.BASE, rows=many, length=many, previous=0)
    target = MemoryState.make_empty({"totals": TOTALS}, GROUPS, 2)
    reader = BlockReader(FilesystemStore(tmp_path), [StoredObject(handle.object, many, handle.checksum)])
    with pytest.raises(CorruptObject, match=r"s/1/a\.segment"):
        apply_reads(target, [Read(2, handle, (GROUPS,))], reader)
