"""A manifest: one object that describes everything one checkpoint wrote, so that the catalog grows only with objects.

It is one row of Arrow, whose columns are lists: handles, objects, digests per operator, table and key group; and
`about`, JSON with everything else: range checksums of objects, and what the commit adds to the catalog. Much of a small
manifest would be framing, so the row is one Arrow message without its schema, compressed as a whole. A stream before
it, which any Arrow reader opens, has one text, `{"format": 1, "row": LENGTH, "compression": "zstd"}`; an xxh3-64 of all
follows, so that altered bytes are noticed before they are decoded:

    stream of the text | zstd(message of the row) | xxh3-64

A row that compresses so well that a reader would refuse to decompress it has compression `""`. `manifest_decoding`
reads it.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from siltstone.decoding import json_bytes_max
from siltstone.format.arrow import is_small
from siltstone.format.versions import Versions
from siltstone.model import Form, Handle, Kind, StoredObject
from siltstone.state.digest import checkpoint_digest
from siltstone.store.checksums import pack

FORMAT = 1
COMPRESSION = "zstd"
_LEVEL = 3
SEAL_BYTES = 8
"""the xxh3-64 at the end"""
_HANDLE = pa.struct(
    [
        ("operator", pa.string()),
        ("variable", pa.string()),
        ("kind", pa.string()),
        ("form", pa.string()),
        ("object", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("checksum", pa.binary()),
        ("start", pa.uint16()),
        ("end", pa.uint32()),
        ("rows", pa.int64()),
        ("previous", pa.int64()),
        ("sqn", pa.int64()),
    ]
)
_OBJECT = pa.struct([("name", pa.string()), ("bytes", pa.int64()), ("checksum", pa.binary())])
_DIGESTS = pa.struct([("operator", pa.string()), ("variable", pa.string()), ("key_groups", pa.binary())])
SCHEMA = pa.schema(
    [
        ("about", pa.string()),
        ("handles", pa.list_(_HANDLE)),
        ("objects", pa.list_(_OBJECT)),
        ("digests", pa.list_(_DIGESTS)),
    ]
)
HEAD = pa.schema([SCHEMA.field(0)])
"""of the stream before the row"""


@dataclass(frozen=True, eq=False)
class Manifest:
    """What one checkpoint wrote.

    Attributes:
        stream: the stream that wrote it, or the fork that it was read for.
        epoch: the writer epoch that wrote it.
        step: its last step.
        operators: operator -> its definition, with the schemas of its tables, as JSON.
        handles: where the bytes of each variable of each subtask are.
        objects: every object it wrote, except itself.
        digests: operator -> table or opaque variable -> uint64[max_parallelism].
        forms: operator -> the form of its part: a base if it has all tables as bases.
        d: operator -> the D in force, of the table with the largest.
        chains: operator -> table -> the checkpoint that its chain began with (`first`) and its policy's state, as JSON.
        event_time_max: the highest event time so far, in UTC; None if there was none.
        statistics: rows, bytes and seconds for reports, as JSON.
        materialization: for a materialization's manifest, its id; it then has one operator's bases, which replace that
            operator's handles in the checkpoint's manifest. Empty for a checkpoint's manifest.
        versions: which checkpoint wrote each variable last, per key group (`format.versions`); empty for a
            materialization.
        commit: what else the commit adds to the catalog (`catalog.commit_details`); empty for a materialization.
    """

    stream: str
    checkpoint: int
    epoch: int
    step: int
    max_parallelism: int
    operators: Mapping[str, Any]
    handles: Sequence[Handle]
    objects: Sequence[StoredObject]
    digests: Mapping[str, Mapping[str, np.ndarray]]
    forms: Mapping[str, Form]
    d: Mapping[str, int] = field(default_factory=dict)
    chains: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    event_time_max: datetime | None = None
    statistics: Mapping[str, Any] = field(default_factory=dict)
    materialization: str = ""
    versions: Versions = field(default_factory=dict)
    commit: Sequence[bytes] = ()

    @cached_property
    def digest(self) -> str:
        """The digest of the whole state at this checkpoint: 32 hex digits, independent of how it is stored."""
        return checkpoint_digest(self.digests)

    @cached_property
    def variables(self) -> dict[str, dict[str, Kind]]:
        """Operator -> table or opaque variable -> its kind, as its definition has them: the list that all go by."""
        return {
            operator: {
                name: Kind.INCREMENTAL if shape["tables"] else Kind.OPAQUE
                for variable, shape in definition["variables"].items()
                for name in shape["tables"] or (variable,)
            }
            for operator, definition in self.operators.items()
        }

    def find_mismatch(self) -> str | None:
        """Say which part names other operators or variables than the definitions do; None if none does.

        A proof and a deletion would go by one part, and a restore by another.
        """
        own = _names(self.variables)
        forms = {operator: self.variables.get(operator, ()) for operator in self.forms}
        parts = {"digests": self.digests, "forms": forms}
        if not self.materialization:
            parts["versions"] = self.versions
        for what, part in parts.items():
            for name in sorted(own ^ _names(part)):
                return f"its {what} lack {name}" if name in own else f"its {what} have {name}, its definitions do not"
        return None

    def of_operator(self, operator: str) -> Self:
        """Return the part that one operator's tasks need: its handles, their objects, and its entries.

        The digest of a part is not the checkpoint's.
        """
        handles = [handle for handle in self.handles if handle.operator == operator]
        named = {handle.object for handle in handles}
        own = {name: {k: v for k, v in getattr(self, name).items() if k == operator} for name in _BY_OPERATOR}
        objects = [o for o in self.objects if o.name in named]
        return replace(self, handles=handles, objects=objects, commit=(), **own)

    def with_bases(self, materialized: Self) -> Self:
        """Return the manifest with a materialization's bases instead of its own handles of the same variables.

        It may be that of another materialization at the checkpoint, if nothing else that was written there is needed.
        Variables that the materialization does not have stay, as in `LiveHandles`; the operator's indexes do not.
        """
        [operator] = materialized.operators
        anew = {h.variable for h in materialized.handles}
        kept = [h for h in self.handles if h.operator != operator or _stays(h, anew)]
        return replace(
            self,
            operators={**self.operators, **materialized.operators},
            digests={**self.digests, **materialized.digests},
            handles=[*kept, *materialized.handles],
            objects=[*self.objects, *materialized.objects],
            forms={**self.forms, operator: Form.BASE},
        )


def _stays(handle: Handle, replaced: set[str]) -> bool:
    return handle.kind is not Kind.INDEX and handle.variable not in replaced


def _names(variables: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the names of operators, and of their variables."""
    return {*variables, *(f"{operator}.{name}" for operator, names in variables.items() for name in names)}


_BY_OPERATOR = ("operators", "digests", "forms", "d", "chains", "versions")
ABOUT = (
    "stream",
    "checkpoint",
    "epoch",
    "step",
    "max_parallelism",
    "operators",
    "forms",
    "d",
    "chains",
    "statistics",
    "materialization",
    "versions",
)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest object."""
    time = manifest.event_time_max
    about = {name: getattr(manifest, name) for name in ABOUT} | {
        "event_time_max": None if time is None else time.isoformat(),
        "ranges": {o.name: astuple(o.ranges) for o in manifest.objects if o.ranges is not None},
        "commit": [base64.b64encode(part).decode() for part in manifest.commit],
    }
    digests = [
        {"operator": operator, "variable": variable, "key_groups": np.ascontiguousarray(groups, "<u8").tobytes()}
        for operator, variables in manifest.digests.items()
        for variable, groups in variables.items()
    ]
    objects = [{"name": o.name, "bytes": o.bytes, "checksum": pack(o.checksum)} for o in manifest.objects]
    handles = [_handle_to_json(handle) for handle in manifest.handles]
    columns = [[_json(about)], [handles], [objects], [digests]]
    arrays = [pa.array(column, of.type) for column, of in zip(columns, SCHEMA, strict=True)]
    batch = pa.record_batch(arrays, schema=SCHEMA)
    row, compression = memoryview(batch.serialize()), ""
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(row) if is_small(batch) else b""
    if packed and batch.column(0).nbytes <= json_bytes_max(len(packed)):
        row, compression = memoryview(packed), COMPRESSION
    data = _head(len(row), compression) + row
    return data + xxhash.xxh3_64_digest(data)


def _json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, separators=(",", ":"))


def _head(row_bytes: int, compression: str) -> bytes:
    """Return the stream before the row."""
    text = _json({"format": FORMAT, "row": row_bytes, "compression": compression})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, HEAD) as out:
        out.write_batch(pa.record_batch([pa.array([text])], schema=HEAD))
    return sink.getvalue().to_pybytes()


def _handle_to_json(handle: Handle) -> dict[str, Any]:
    plain = {name: getattr(handle, name) for name in _HANDLE.names if name not in ("start", "end")}
    groups = handle.key_groups
    return plain | {"checksum": pack(handle.checksum), "start": groups.start, "end": groups.end}
