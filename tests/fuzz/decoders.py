"""Every decoder of stored bytes, with what it may raise, and how damage is given the checksums that it needs."""

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash

from siltstone.catalog.database.packing import unpack
from siltstone.catalog.extract_coding import decode_extract, seal
from siltstone.catalog.records.commit_details import decode_details, encode_details, pack_parts
from siltstone.catalog.records.imports import Continuation
from siltstone.catalog.records.source_entries import (
    count_files,
    decode_offsets,
    decode_sources,
    list_files,
    merge,
    split,
    to_spark,
    without_files,
)
from siltstone.chains.policy_rules import PolicyState
from siltstone.change.exported import Exported, decode_exported, read_exported_manifest
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.decoding import translate_decode_errors
from siltstone.errors import CorruptObject, NewerFormat, SiltstoneError, StateError, UsageError
from siltstone.format.base import read_base, read_snapshot_values
from siltstone.format.block import decode_block
from siltstone.format.files import decode_files
from siltstone.format.index import decode_index, field_bytes
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.format.opaque import decode_opaque
from siltstone.format.output import read_output
from siltstone.format.segment import Section, Segment
from siltstone.model import KeyGroupRange, StoredObject
from siltstone.run.step_digests import decode_digests
from siltstone.state.backends.rocksdb.coding import KeyCoding, RowCoding
from siltstone.state.backends.rocksdb.files import RowFiles, decode_rows, write_manifest
from siltstone.state.backends.rocksdb.scan_process import unpack_pairs
from siltstone.state.backends.rocksdb.scan_program import HEAD
from siltstone.state.digest import row_digests
from siltstone.state.nested import decode_nested, encode_nested
from siltstone.state.schema import OPAQUE_SCHEMA, TableSchema
from siltstone.store.base import Store
from siltstone.store.identity import encode_identity, read_identity
from siltstone.store.keyvalue.protocol import Header
from siltstone.store.paths import IDENTITY, CheckpointPath
from tests.crafted_files import blocks_of, mend_manifest, mend_table

NAME = "s/00000001/000000000001/fuzzed"
TOTALS = TableSchema(
    pa.schema([("k", pa.int64())]),
    pa.schema([("at", pa.timestamp("us", "UTC"))]),
    pa.schema([("s", pa.string()), ("d", pa.decimal128(20, 2)), ("b", pa.bool_()), ("f", pa.float64())]),
)
NESTED = pa.struct(
    [
        ("s", pa.string()),
        ("l", pa.list_(pa.struct([("d", pa.decimal128(20, 2)), ("b", pa.list_(pa.bool_()))]))),
        ("w", pa.list_(pa.struct([(f"f{i}", pa.int64()) for i in range(100)]))),
    ]
)
TEXTS = TableSchema(
    pa.schema([pa.field("k", pa.string(), nullable=True)]),
    pa.schema([("at", pa.timestamp("us", "UTC")), ("part", pa.binary())]),
    TOTALS.value,
)
"""with keys whose strings have an end each"""
CORPUS = Path(__file__).parent / "corpus"
_SEAL_BYTES = 8
_TRAILER_BYTES = 12


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        decode: reads the bytes, and uses what comes of them as the engine does.
        errors: what it may raise.
        seal: gives damaged bytes the checksums of whole ones.
        cost: how many inputs of another decoder take as long as one of this.
    """

    decode: Callable[[bytes], object]
    errors: tuple[type[SiltstoneError], ...] = (CorruptObject, NewerFormat)
    seal: Callable[[bytes], bytes] = bytes
    cost: int = 1


class _OneObject:
    """A store that holds one object, whatever its name is."""

    label = "the store of the fuzzer"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter([(IDENTITY, len(self.data))])

    def read(self, stored: StoredObject) -> pa.Buffer:
        return pa.py_buffer(self.data)

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        return pa.py_buffer(self.data[offset : offset + length])


def _store(data: bytes) -> Store:
    return cast(Store, _OneObject(data))


def _at_end(data: bytes) -> bytes:
    """With the xxh3-64 of what precedes it at the end."""
    return data[:-_SEAL_BYTES] + xxhash.xxh3_64_digest(data[:-_SEAL_BYTES])


def _after_magic(data: bytes) -> bytes:
    return data[:_SEAL_BYTES] + _at_end(data[_SEAL_BYTES:])


def _segment_seal(data: bytes) -> bytes:
    """With the checksum of its footer; that of its index is in what precedes it."""
    tail = len(data) - _TRAILER_BYTES
    start = tail - int.from_bytes(data[max(tail, 0) : tail + 4], "little") if tail > 0 else -1
    if not 0 <= start <= tail - _SEAL_BYTES:
        return data
    return data[:start] + _at_end(data[start:tail]) + data[tail:]


def _identity_seal(data: bytes) -> bytes:
    found = re.search(rb"[0-9a-f]{32}", data)
    return data if found is None else encode_identity(found[0].decode())


def _block(data: bytes) -> None:
    row_digests(decode_block(data, NAME)[0])


def _nested(data: bytes) -> None:
    encode_nested(decode_nested(pa.array([data, None, data]), NESTED, NAME))


def _index(data: bytes) -> None:
    decode_index(data, NAME)
    field_bytes(data)


def _segment(data: bytes) -> None:
    segment = Segment.unpack(data, NAME)
    segment.handles(dict.fromkeys(Section, (NAME, 0)))


def _manifest(data: bytes) -> None:
    manifest = decode_manifest(data, NAME)
    assert len(manifest.digest) == 32
    for operator in manifest.operators:
        manifest.of_operator(operator)
    for states in manifest.chains.values():
        for state in states.values():
            PolicyState.from_json(state)


def _base(data: bytes) -> None:
    for groups in (None, KeyGroupRange(1, 3)):
        for rows, owners in read_base(data, TOTALS, groups, name=NAME):
            row_digests(rows)
            assert groups is None or (groups.start <= owners[0] and owners[-1] < groups.end)


def _output(data: bytes) -> None:
    for batch in read_output(_store(data), StoredObject(NAME, len(data), "")):
        batch.get_total_buffer_size()
        pa.Table.from_batches([batch]).slice(0, 3).combine_chunks()


def _sources(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for numbered in decode_sources(merge([text, without_files(text)])).values():
        for entry in split(numbered).values():
            list_files(to_spark(entry))
            list_files(entry)
    count_files(text)


def _text(data: bytes) -> str:
    return unpack(data)


def _extract(data: bytes) -> None:
    decode_extract(seal(data.decode("utf-8", "replace")), NAME)


def _exported(data: bytes) -> None:
    decode_exported(seal(data.decode("utf-8", "replace")), NAME)


def _exported_manifest(data: bytes) -> None:
    found = decode_manifest(data, NAME)
    name = CheckpointPath(found.stream, 1, 1).manifest()
    stored = StoredObject(name, len(data), "")
    exported = Exported(found.stream, "saved", 7, "s", stored, found.digest, Continuation(None, 0, None))
    _, details = read_exported_manifest(_store(data), exported)
    encode_details(details)


def _header(data: bytes) -> Any:
    header = Header.decode(data, NAME)
    return header and (header.value_bytes, header.bytes_of(0))


def _pairs(data: bytes) -> None:
    with translate_decode_errors(NAME, "rows of RocksDB"):
        _, count, key_bytes, _ = HEAD.unpack(data[: HEAD.size])
        packed = unpack_pairs(np.frombuffer(data[HEAD.size :], np.uint8), count, key_bytes)
        rows, _ = decode_rows(TEXTS, KeyCoding(TEXTS, b"t\0\0"), RowCoding(TEXTS), *packed)
        row_digests(rows)


def split_set(data: bytes) -> tuple[bytes, bytes]:
    """Return RocksDB's manifest and the one table file of a set, before which its length is."""
    size = int.from_bytes(data[:4], "little")
    return data[4 : 4 + size], data[4 + size :]


def join_set(manifest: bytes, table: bytes) -> bytes:
    """Undo `split_set`."""
    return len(manifest).to_bytes(4, "little") + manifest + table


def _table_files(data: bytes) -> None:
    manifest, table = split_set(data)
    with tempfile.TemporaryDirectory() as scratch, translate_decode_errors(NAME, "files of RocksDB"):
        directory = Path(scratch)
        write_manifest(directory, "MANIFEST-000005", manifest)
        (directory / "000009.sst").write_bytes(table)
        files = RowFiles(directory, {"totals": TEXTS}, len(table))
        try:
            for rows, _ in files.scan("totals", KeyGroupRange(0, 4)):
                row_digests(rows)
        finally:
            files.close()


def _mend_set(data: bytes) -> bytes:
    manifest, table = split_set(data)
    return join_set(mend_manifest(manifest), mend_table(table, _blocks()))


@cache
def _blocks() -> list[tuple[int, int]]:
    return blocks_of(split_set((CORPUS / "table-files" / "seed-0.bin").read_bytes())[1])


DECODERS = {
    "block": Decoder(_block, seal=_after_magic),
    "index": Decoder(_index, seal=_after_magic),
    "opaque": Decoder(lambda data: decode_opaque(data, NAME), seal=_after_magic),
    "files": Decoder(lambda data: decode_files(data, NAME), seal=_after_magic),
    "pairs": Decoder(_pairs),
    "table-files": Decoder(_table_files, seal=_mend_set, cost=20),
    "nested": Decoder(_nested),
    "segment": Decoder(_segment, seal=_segment_seal),
    "manifest": Decoder(_manifest, (CorruptObject, NewerFormat, StateError), _at_end),
    "base": Decoder(_base),
    "snapshot": Decoder(lambda data: read_snapshot_values(data, OPAQUE_SCHEMA, name=NAME)),
    "output": Decoder(_output),
    "identity": Decoder(lambda data: read_identity(_store(data)), seal=_identity_seal),
    "chunks": Decoder(_header, seal=_at_end),
    "acknowledgement": Decoder(Acknowledgement.from_bytes, (StateError,)),
    "sources": Decoder(_sources, (StateError,)),
    "offsets": Decoder(lambda data: decode_offsets(data.decode("utf-8", "replace")), (StateError, UsageError)),
    "digests": Decoder(lambda data: decode_digests(data.decode("utf-8", "replace")), (StateError,)),
    "packed": Decoder(_text, (StateError,)),
    "details": Decoder(lambda data: decode_details(pack_parts(data.decode("utf-8", "replace")), NAME), (StateError,)),
    "extract": Decoder(_extract, (StateError, NewerFormat)),
    "exported": Decoder(_exported, (StateError, NewerFormat)),
    "exported-manifest": Decoder(_exported_manifest, (CorruptObject, NewerFormat), _at_end),
}


def _hang(data: bytes) -> None:
    while data:
        pass


TRAPS = {
    "dies": Decoder(lambda data: os.kill(os.getpid(), signal.SIGSEGV)),
    "hangs": Decoder(_hang),
    "bloats": Decoder(lambda data: len(data * (300 << 20))),
    "raises": Decoder(lambda data: data.decode("ascii")),
}
"""what the fuzzer must notice"""
