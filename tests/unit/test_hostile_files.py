"""Crafted `.files` objects, exports that claim files, and genuine files in each other's place are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.exported import Exported, read_exported_manifest
from siltstone.errors import CorruptObject, NewerFormat
from siltstone.format.coding import seal
from siltstone.format.files import MAGIC, FilesIndex, TableFile, TableRows, decode_files, encode_files
from siltstone.format.manifest import encode_manifest
from siltstone.format.manifests import read_manifests
from siltstone.model import Form, KeyGroupRange, StoredObject
from siltstone.restore.table import read_table
from siltstone.state.schema import TableSchema
from siltstone.store.checksums import checksum_of
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath
from tests.files_cases import files_of, manifest_of, rows, run_of
from tests.proofs import failures
from tests.sums import NAME

SCHEMA = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", pa.int64())]))
INDEX = FilesIndex(
    KeyGroupRange(0, 4),
    8,
    {"t": TableRows(SCHEMA, 3, 2)},
    (TableFile("000009.sst", 10, "sha256:00"), TableFile("000012.sst", 10, "sha256:01")),
    ("MANIFEST-000014", b"manifest"),
)


def changed(**parts: Any) -> bytes:
    plain = json.loads(encode_files(INDEX)[len(MAGIC) : -8])
    return seal(json.dumps(plain | parts).encode(), MAGIC)


def test_what_was_encoded_is_decoded() -> None:
    assert decode_files(encode_files(INDEX)) == INDEX == decode_files(changed())


@pytest.mark.parametrize(
    "parts",
    [
        {"files": [["../../000009.sst", 1, "x"]]},
        {"files": [["CURRENT", 1, "x"]]},
        {"files": [["000009.sst/../x", 1, "x"]]},
        {"files": [["000009.sst", -1, "x"]]},
        {"files": [["000009.sst", 1, 7]]},
        {"files": [["000009.sst", 1, "x"], ["000009.sst", 1, "y"]]},
        {"files": [["\uff10\uff10\uff10\uff1009.sst", 1, "x"]]},
        {"files": [7]},
        {"files": [["000009.sst", 1, "x"]] * 400_000},
        {"manifest": ["../MANIFEST-000014", ""]},
        {"manifest": ["MANIFEST-", ""]},
        {"manifest": ["MANIFEST-000014", "no base64"]},
        {"tables": {"../t": {"schema": SCHEMA.to_json(), "rows": 1, "interval": 1}}},
        {"tables": {"t": {"schema": SCHEMA.to_json(), "rows": -1, "interval": 1}}},
        {"tables": {"t": {"schema": SCHEMA.to_json(), "rows": 1, "interval": 1 << 32}}},
        {"tables": {"t": {"schema": {}, "rows": 1, "interval": 1}}},
        {"key_groups": [3, 3]},
        {"key_groups": [0, 9]},
        {"max_parallelism": 1 << 40},
        {"engine": "leveldb"},
    ],
)
def test_a_crafted_index_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(CorruptObject, match="an index"):
        decode_files(changed(**parts), "an index")


def test_a_later_format_says_so() -> None:
    with pytest.raises(NewerFormat, match="upgrade siltstone"):
        decode_files(seal(b"{}", MAGIC[:-1] + b"2"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    with OpenWarehouse.open_writable(str(root / "w")) as place:
        run = run_of(place)
        for n in (1, 2):
            run.step(rows(n))
        run.region.close("stopped")
    return root


@pytest.mark.parametrize("what", [".sst", ".files"])
def test_another_genuine_file_is_refused(written: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(written / "w", tmp_path / "w")
    with OpenWarehouse.open_existing(str(tmp_path / "w")) as place:
        objects = place.warehouse.local.objects
        new = sorted(n for n in files_of(place, 2) if n.endswith(what) and n not in files_of(place, 1))
        old = sorted(n for n in files_of(place, 1) if n.endswith(what))
        (objects / new[0]).chmod(0o600)
        (objects / new[0]).write_bytes((objects / old[0]).read_bytes())
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, 2), NAME)
        with pytest.raises(CorruptObject, match=new[0]):
            read_table(place.warehouse.store, manifests, NAME, "largest")
        assert [(f.checkpoint, f.object) for f in failures(place, NAME)] == [(2, new[0])]


def test_files_that_claim_others_are_refused_before_rocksdb_opens_them(written: Path, tmp_path: Path) -> None:
    """A whole set of genuine objects, with a manifest that leaves one of them out."""
    shutil.copytree(written / "w", tmp_path / "w")
    with OpenWarehouse.open_existing(str(tmp_path / "w")) as place:
        manifest = manifest_of(place, 1)
        gone = sorted(n for n in files_of(place, 1) if n.endswith(".sst"))[0]
        handles = [h for h in manifest.handles if h.object != gone]
        with pytest.raises(CorruptObject, match="that no handle of largest has"):
            read_table(place.warehouse.store, {1: replace(manifest, handles=handles)}, NAME, "largest")


def test_an_export_with_files_is_refused(written: Path, tmp_path: Path) -> None:
    with OpenWarehouse.open_existing(str(written / "w")) as place:
        manifest = replace(manifest_of(place, 1), epoch=1, checkpoint=1)
        assert any(h.form is Form.FILES for h in manifest.handles)
        store, data = FilesystemStore(tmp_path), encode_manifest(manifest)
        store.put(CheckpointPath(NAME, 1, 1).manifest(), data)
        stored = StoredObject(CheckpointPath(NAME, 1, 1).manifest(), len(data), checksum_of(data))
        said: Any = None
        exported = Exported(NAME, "saved", 1, NAME, stored, manifest.digest, said)
        with pytest.raises(CorruptObject, match="no export has files of RocksDB"):
            read_exported_manifest(store, exported)
