"""Writes the valid encodings that the fuzzer begins with, and the crafted ones (`python -m tests.fuzz.seeds`); what it
found lies beside."""

import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import zstandard
from sqlalchemy import Column

from siltstone.catalog.database.column_types import Json, PackedJson
from siltstone.catalog.database.packing import pack
from siltstone.catalog.extract_coding import encode_extract, text_of
from siltstone.catalog.records.commit_details import CommitDetails, PreviousCheckpoint, encode_details, unpack_parts
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.extracts import TABLES, Extract, ReferenceCopy, Retained, StepPart
from siltstone.catalog.records.imports import Continuation
from siltstone.catalog.records.outbox import Output
from siltstone.catalog.records.steps import Step, StepRecord
from siltstone.change.exported import Exported, encode_exported
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.format.base import write_base
from siltstone.format.block import encode_block
from siltstone.format.files import FilesIndex, TableFile, TableRows, encode_files
from siltstone.format.manifest import HEAD, SEAL_BYTES, Manifest, encode_manifest
from siltstone.format.opaque import encode_opaque
from siltstone.format.output import Staged
from siltstone.format.segment import SegmentBuilder
from siltstone.model import Form, Handle, KeyGroupRange, Kind, RangeChecksums, SinkFile, StoredObject
from siltstone.restore.export import opaque_rows
from siltstone.run.step_digests import OperatorDigests, encode_digests
from siltstone.state.backends.rocksdb import RocksDBBackend
from siltstone.state.backends.rocksdb.coding import KeyCoding, RowCoding
from siltstone.state.backends.rocksdb.files import manifest_of, table_files
from siltstone.state.backends.rocksdb.scan_program import HEAD as PAIRS_HEAD
from siltstone.state.digest import row_digests
from siltstone.state.nested import encode_nested
from siltstone.state.protocol import set_state
from siltstone.state.rows_digest import DigestedRows
from siltstone.state.schema import DELETED, OPAQUE_SCHEMA
from siltstone.store.identity import encode_identity
from siltstone.store.keyvalue.protocol import Header
from siltstone.store.paths import CheckpointPath
from tests.fuzz.crafted import crafted
from tests.fuzz.decoders import CORPUS, NAME, NESTED, TEXTS, TOTALS, join_set
from tests.stored import bare_statistics

ROWS = 12
GROUPS = KeyGroupRange(0, 4)
CHECKSUM = "xxh3-128:" + "ab" * 16
_NESTED = [
    {"s": "text", "l": [None, {"d": Decimal(7), "b": [True, None, False]}, {"d": None, "b": None}], "w": []},
    {"s": None, "l": None, "w": [None] * 9 + [{f"f{i}": i for i in range(100)}]},
]
SINK_FILE = SinkFile(
    "_sinks/s/op/00000001/000000000002/op.0-a.rows.parquet", 9, CHECKSUM, statistics='{"numRecords": 3}'
)
TIMES = {"from": 10**12, "checkpoints": [[2, 1, None]], "steps": [[2, 0, 5]]}
STORED = StoredObject(NAME, 900, CHECKSUM, RangeChecksums("xxh3-128", 1 << 18, "00" * 16))


def _files() -> FilesIndex:
    files = tuple(TableFile(f"{n:06d}.sst", 900 * n, STORED.checksum) for n in (9, 12))
    return FilesIndex(GROUPS, 8, {"totals": TableRows(TOTALS, ROWS, 3)}, files, ("MANIFEST-000014", bytes(range(99))))


def _rows() -> pa.Table:
    columns = [
        np.arange(ROWS) * 7,
        pa.array(range(ROWS), pa.timestamp("us", "UTC")),
        pa.array([None if i == 3 else f"text {i}" * (i % 3) for i in range(ROWS)]),
        pa.array([Decimal(i) for i in range(ROWS)], pa.decimal128(20, 2)),
        pa.array([i % 2 == 0 for i in range(ROWS)]),
        np.linspace(-1, 1, ROWS),
    ]
    return pa.table(columns, schema=TOTALS.rows)


def _texts() -> pa.Table:
    keys = pa.array([None if i == 5 else "\0" * (i % 3) + f"key {i}" for i in range(ROWS)])
    times = pa.array(range(ROWS), pa.timestamp("us", "UTC"))
    parts = pa.array([b"\0\xff" * (i % 4) for i in range(ROWS)])
    return pa.table([keys, times, parts, *_rows().select(TOTALS.value.names).columns], schema=TEXTS.rows)


def _pairs() -> bytes:
    """A frame of rows, as the process sends it that reads table files."""
    rows = _texts()
    keys = KeyCoding(TEXTS, b"t\0\0").encode(rows.select(TEXTS.primary_key.names), _owners()).to_pylist()
    values = RowCoding(TEXTS).encode(rows.select(TEXTS.value.names), row_digests(rows), 0).to_pylist()
    sizes = [len(b"".join(strings)) for strings in (keys, values)]
    lengths = b"".join(len(each).to_bytes(4, "little") for each in keys + values)
    return PAIRS_HEAD.pack(b"r", ROWS, *sizes) + lengths + b"".join(keys + values)


def _table_files() -> bytes:
    """RocksDB's manifest, and the one table file of a small state."""
    with tempfile.TemporaryDirectory() as scratch:
        state = RocksDBBackend().open(Path(scratch) / "state", {"totals": TEXTS}, (), GROUPS, len(GROUPS))
        state.begin(1, tracking=False)
        set_state(state, "totals", _texts(), _owners())
        state.copy_rows(Path(scratch) / "files")
        state.close()
        directory = Path(scratch) / "files"
        [table] = table_files(directory)
        assert table == "000009.sst", table
        return join_set(manifest_of(directory).read_bytes(), (directory / table).read_bytes())


def _owners() -> np.ndarray:
    return np.sort(np.arange(ROWS) % len(GROUPS)).astype(np.uint16)


def _segment() -> tuple[bytes, bytes]:
    """A segment, and its index by itself."""
    changes = _rows().append_column(DELETED, pa.array([False] * ROWS))
    builder = SegmentBuilder("totals_by_key", 2, GROUPS)
    builder.add_opaque("models", {0: b"abc", 3: b""})
    builder.add_delta("totals", encode_block(changes, _owners()), 1, 0, digest=7, sqn=1)
    builder.add_delta("recent.bounds", encode_block(changes.slice(2, 4), _owners()[2:6]), 1, 1, digest=8, sqn=1)
    builder.add_base("recent", STORED, ROWS, digest=9, sqn=1)
    segment = builder.build()
    return segment.pack(), bytes(segment.index)


def _manifest() -> Manifest:
    table = {"kind": "ValueState", "tables": {"totals": TOTALS.to_json()}}
    definition = {"key": [["k", "int64"]], "variables": {"totals": table, "models": {"kind": "", "tables": {}}}}
    handles = [
        Handle("op", "totals", Kind.INCREMENTAL, Form.DELTA, NAME, 0, 700, CHECKSUM, GROUPS, ROWS, 1, 3),
        Handle("op", "models", Kind.OPAQUE, Form.BASE, NAME, 700, 100, CHECKSUM, GROUPS, 0, 0),
        Handle("op", "INDEX", Kind.INDEX, Form.BASE, NAME, 800, 100, CHECKSUM, GROUPS, 0, 0),
    ]
    digests = {"op": {name: np.arange(len(GROUPS)).astype(np.uint64) for name in ("totals", "models")}}
    return Manifest(
        stream="s",
        checkpoint=2,
        epoch=1,
        step=2,
        max_parallelism=len(GROUPS),
        operators={"op": definition},
        handles=handles,
        objects=[STORED],
        digests=digests,
        forms={"op": Form.DELTA},
        d={"op": 4},
        statistics=bare_statistics("op", rows=ROWS, parallelism=2) | {"times": TIMES},
        versions={"op": {"totals": [(0, 2)], "models": [(0, 1), (2, 2)]}},
    )


def _exported_manifest() -> bytes:
    """The manifest of an export, uncompressed, with a step and a definition."""
    path = CheckpointPath("s", 1, 1)
    plain, stored = _manifest(), replace(STORED, name=path.base("op", "totals", 0, "a"))
    steps = [Step(2, 1, 'v1\n{"conf":{}}\n{"logOffset":0}', '{"0": {"0": "v1\\n9"}}')]
    details = CommitDetails(steps=steps, definition={"operators": plain.operators, "options": {}})
    manifest = replace(
        plain,
        checkpoint=1,
        handles=[replace(h, object=stored.name, form=Form.BASE, previous=0) for h in plain.handles],
        objects=[stored],
        forms={"op": Form.BASE},
        chains={"op": {"totals": {"first": 1, "deltas": 0, "base_bytes": 7.5}}},
        versions={"op": {"totals": [(0, 1)], "models": [(0, 1)]}},
        commit=encode_details(details),
    )
    return _uncompressed(encode_manifest(manifest))


def _uncompressed(manifest: bytes) -> bytes:
    """The same manifest, so that what the fuzzer alters is its content."""
    [head] = pa.ipc.open_stream(manifest).read_all().to_pylist()
    said = json.loads(head["about"])
    row = zstandard.decompress(manifest[-SEAL_BYTES - said["row"] : -SEAL_BYTES])
    text, sink = json.dumps({**said, "row": len(row), "compression": ""}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, HEAD) as out:
        out.write_batch(pa.record_batch([pa.array([text])], schema=HEAD))
    body = sink.getvalue().to_pybytes() + row
    return body + xxhash.xxh3_64_digest(body)


def _output(compression: str | None) -> bytes:
    rows, sink = _rows(), pa.BufferOutputStream()
    nested = rows.append_column("l", pa.array([[{"x": i}] * i for i in range(ROWS)]))
    with pa.ipc.new_stream(sink, nested.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
        out.write_table(nested)
        out.write_table(nested.slice(0, 2))
    return sink.getvalue().to_pybytes()


def _parquet(table: pa.Table | None = None) -> bytes:
    file = io.BytesIO()
    if table is None:
        write_base(file, TOTALS, [(_rows(), _owners())])
    else:
        pq.write_table(table, file)
    return file.getvalue()


_OFFSETS = {"v1": '-\n{"logOffset":0}', "v1 named": 'clicks:-\nclicks.1:{"logOffset":0}', "v2": "0:5\nclicks:7"}
"""version -> the lines of two sources"""
_CLOCK = '{"source":1700000000000}'
_ROWS = DigestedRows(3, 7, "0123456789abcdef")
_DIGESTS = encode_digests({"op": OperatorDigests(_ROWS, {"op": _ROWS}), "other": OperatorDigests(None, {})})


def _details() -> CommitDetails:
    name = "s/00000001/000000000001/manifest.arrow"
    return CommitDetails(
        steps=[Step(2, 1, 'v1\n{"conf":{}}\n{"logOffset":0}', "{}", digests=_DIGESTS, clock=_CLOCK)],
        edit=Edit("op", "totals", 1, 2, "rows.csv", None, "me"),
        parallelism=2,
        definition={"operators": {}, "options": {}},
        dropped=("op.old",),
        outputs=(Output("op", b"schema", 3, (STORED,)), Output("other", b"schema", 3, (SINK_FILE,))),
        previous=PreviousCheckpoint(StoredObject(name, 9, CHECKSUM), datetime(2020, 1, 1, tzinfo=UTC)),
        outstanding=((1, "op"),),
    )


def _exported() -> Exported:
    manifest = StoredObject("s/00000001/000000000001/manifest.arrow", 900, CHECKSUM)
    beginning = Step(0, -1, "v1\n{}\n-", '{"0": {"7": "v1\\n9"}}')
    return Exported("s", "saved", 7, "s", manifest, CHECKSUM, Continuation(beginning, 6, "table"))


def _extract() -> Extract:
    at = datetime(2020, 1, 1, tzinfo=UTC)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    for name, table in TABLES.items():
        row: dict[str, Any] = {column.key: 1 for column in table.c}
        for column in table.c:
            if column.type.python_type is not int:
                made = {str: "op", bytes: b"x", datetime: at, dict: {}, bool: False, float: 1.0}
                row[column.key] = "s" if column.key == "stream" else made[_python_type(column)]
        rows[name].append(row)
    rows["stream"][0] |= {"name": "s", "forked_from": None}
    return Extract(
        stream="s",
        epoch=2,
        number=3,
        rows=rows,
        retained=[Retained(1, 4, "s", 1, False, at), Retained(6, 6, "s", 2, True, at)],
        copies=[ReferenceCopy(4, 9, at, 1, (STORED,))],
        oldest_step=2,
        logged=[StepRecord(9, 8, "v1", "{}", clock=_CLOCK, checkpoint=7)],
        beginning=STORED,
        parts=[StepPart(STORED, 2, ((5, 5),))],
    )


def _python_type(column: Column[Any]) -> type:
    if isinstance(column.type, Json | PackedJson):
        return dict
    return getattr(column.type, "impl", column.type).python_type


def seeds() -> Mapping[str, list[bytes]]:
    """Decoder -> valid encodings."""
    segment, index = _segment()
    changes = _rows().append_column(DELETED, pa.array([False] * ROWS))
    manifest = encode_manifest(_manifest())
    said = Acknowledgement(
        "op",
        1,
        GROUPS,
        handles=_manifest().handles,
        objects=[STORED],
        inline=[b"packed"],
        digests={"totals": np.arange(4).astype(np.uint64)},
        outputs={"op": Staged(3, (STORED,), b"inline"), "other": Staged(3, (SINK_FILE,))},
        read=_ROWS,
        made={"op": _ROWS},
    )
    line = '{"path":"file:///in/%d.parquet","timestamp":1372896000000,"batchId":%d,"size":4096}'
    files = json.dumps({"0": {"7": "\n".join(["v1", line % (1, 6), line % (2, 7)])}, "1": {"0": "v1\n9"}})
    blocks = [encode_block(changes, _owners(), compression=packed).data for packed in (True, False)]
    return {
        "block": blocks,
        "index": [index],
        "opaque": [encode_opaque({0: b"abc", 5: b"", 9: b"x" * 99})],
        "files": [encode_files(_files())],
        "pairs": [_pairs()],
        "table-files": [_table_files()],
        "nested": encode_nested(pa.array(_NESTED, NESTED)).to_pylist(),
        "segment": [segment],
        "manifest": [manifest, _uncompressed(manifest)],
        "base": [_parquet()],
        "snapshot": [_parquet(opaque_rows({0: b"abc", 3: b""}))],
        "output": [_output(None), _output("zstd"), _output("lz4")],
        "identity": [encode_identity("0123456789abcdef" * 2)],
        "chunks": [Header(1024, 3, 17, b"12345678").encode()],
        "acknowledgement": [said.to_bytes()],
        "sources": [files.encode(), files.replace('"0": {"7"', '"clicks.1": {"7"').encode()],
        "offsets": [f"{version}\n{{}}\n{lines}".encode() for version, lines in _OFFSETS.items()],
        "digests": [_DIGESTS.encode()],
        "packed": [pack(files)],
        "extract": [text_of(encode_extract(_extract())).encode()],
        "exported-manifest": [_exported_manifest()],
        "exported": [text_of(encode_exported(_exported())).encode()],
        "details": [unpack_parts(encode_details(_details())).encode()],
    }


if __name__ == "__main__":
    for decoder, encodings in seeds().items():
        for number, encoding in enumerate(encodings):
            path = CORPUS / decoder / f"seed-{number}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoding)
    for decoder, schema in {"base": TOTALS.rows, "snapshot": OPAQUE_SCHEMA}.items():
        for what, encoding in crafted(schema).items():
            (CORPUS / decoder / f"found-{what}.bin").write_bytes(encoding)
