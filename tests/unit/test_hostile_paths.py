"""Names and links that somebody planted in a store, a catalog or a warehouse lead nowhere else (promise 8)."""

import json
import os
from pathlib import Path

import pytest

from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.errors import CorruptObject, StateError, UsageError
from siltstone.spark.source_log import SourceLog
from siltstone.store.base import Store
from siltstone.store.directories import path_below
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.open import open_store
from siltstone.store.paths import LocalLayout

OFFSETS = 'v1\n{"batchWatermarkMs":0}\n{"logOffset":0}'
LINE = 'v1\n{"path":"file:///in/a.parquet","timestamp":1,"batchId":%s}'
OUTSIDE = ["../../x", "..", ".", "", "/tmp/x", "a/b", "a\0b", "0/../../x"]


def _tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def stores(tmp_path: Path) -> list[Store]:
    return [FilesystemStore(tmp_path / "files"), open_store(f"rocksdb://{tmp_path}/rocks?chunk_bytes=1024")]


@pytest.mark.parametrize("source", [*OUTSIDE, "{absolute}"])
def test_a_source_key_of_stored_steps_never_becomes_a_path_outside(tmp_path: Path, source: str) -> None:
    """Issue 11, item 1a: `../../x` and absolute paths were written."""
    key = source.format(absolute=tmp_path / "absolute")
    location = tmp_path / "warehouse" / "work" / "spark"
    step = Step(1, 0, OFFSETS, json.dumps({key: {"0": LINE % 0}}))
    with pytest.raises(StateError, match="input log"):
        SourceLog(location).prepare(InputPosition(None, [step], [step]))
    assert _tree(tmp_path) == set()


@pytest.mark.parametrize("number", [*OUTSIDE, "-1", "1" * 19, "\u0661"])
def test_a_number_of_stored_steps_never_becomes_a_path_outside(tmp_path: Path, number: str) -> None:
    step = Step(1, 0, OFFSETS, json.dumps({"0": {number: LINE % 0}}))
    with pytest.raises(StateError, match="input log"):
        SourceLog(tmp_path / "spark").prepare(InputPosition(None, [step], [step]))
    assert _tree(tmp_path) == set()


@pytest.mark.parametrize("batch", ['"../../x"', "-1", "1e3", "null", "[0]", "[" * 100_000])
def test_a_batch_id_of_merged_entries_never_becomes_a_path_outside(tmp_path: Path, batch: str) -> None:
    beginning = Step(0, BEFORE_FIRST, "", json.dumps({"0": {"0": LINE % batch}}))
    with pytest.raises(StateError, match="input log"):
        SourceLog(tmp_path / "spark").prepare(InputPosition(beginning, [], []))
    assert _tree(tmp_path) == set()


@pytest.mark.parametrize("part", OUTSIDE)
def test_a_join_of_paths_stays_below_its_root(tmp_path: Path, part: str) -> None:
    with pytest.raises(UsageError, match="cannot be a name"):
        path_below(tmp_path, "inner", part)


def test_a_link_below_a_warehouse_is_refused_and_one_above_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "warehouse").symlink_to(tmp_path / "elsewhere")
    layout = LocalLayout(tmp_path / "warehouse")
    assert layout.work("s", 1) == tmp_path / "warehouse/work/s/00000001"
    (tmp_path / "elsewhere/work").mkdir()
    (tmp_path / "elsewhere/work/s").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="symbolic link"):
        layout.state("s", 1, "operator", 0)


def test_a_sweep_deletes_nothing_through_a_planted_link(tmp_path: Path, stores: list[Store]) -> None:
    """Issue 11, item 1: `objects/.tmp` as a link made a sweep delete elsewhere."""
    treasure = tmp_path / "elsewhere" / "treasure"
    treasure.parent.mkdir()
    treasure.write_text("kept")
    for store, root in zip(stores, ("files", "rocks"), strict=True):
        (tmp_path / root).mkdir()
        (tmp_path / root / ".tmp").symlink_to(treasure.parent)
        with pytest.raises(UsageError, match="symbolic link"):
            list(store.list_unfinished())
        with pytest.raises(UsageError, match="symbolic link"):
            store.put("s/1/a", os.urandom(4096))
        assert [path.name for path in treasure.parent.iterdir()] == ["treasure"]
    assert treasure.read_text() == "kept"


def test_a_link_in_the_place_of_a_directory_is_neither_listed_nor_written_nor_deleted(
    tmp_path: Path, stores: list[Store]
) -> None:
    elsewhere = [FilesystemStore(tmp_path / "a"), open_store(f"rocksdb://{tmp_path}/b")]
    for store, root, other, outside in zip(stores, ("files", "rocks"), elsewhere, ("a", "b"), strict=True):
        stored = other.put("1/x", b"kept")
        (tmp_path / root).mkdir()
        (tmp_path / root / "s").symlink_to(tmp_path / outside)
        assert list(store.list("")) == []
        with pytest.raises(UsageError, match="symbolic link"):
            store.put("s/1/y", b"lost")
        with pytest.raises(UsageError, match="symbolic link"):
            store.delete(["s/1/x"])
        assert other.read(stored).to_pybytes() == b"kept"


def test_a_directory_exchanged_for_a_link_leads_no_write_outside(tmp_path: Path) -> None:
    """While an object was written its directory was renamed and a link put there: the object appeared outside."""
    store = FilesystemStore(tmp_path / "files")
    store.put("s/1/other", b"x")
    (tmp_path / "outside").mkdir()
    with pytest.raises(UsageError, match="symbolic link"), store.create("s/1/a") as writer:
        writer.write(b"payload")
        (tmp_path / "files/s/1").rename(tmp_path / "files/s/moved")
        (tmp_path / "files/s/1").symlink_to(tmp_path / "outside")
    assert list((tmp_path / "outside").iterdir()) == []
    assert list((tmp_path / "files/.tmp").iterdir()) == []


def test_a_directory_exchanged_for_a_link_leads_no_deletion_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link put there between the look at the path and the deletion: a file outside was deleted."""
    store, outside = FilesystemStore(tmp_path / "files"), tmp_path / "outside"
    store.put("s/1/a", b"x")
    outside.mkdir()
    (outside / "a").write_text("kept")
    unlink = os.unlink

    def exchange_first(path: str | Path, *, dir_fd: int | None = None) -> None:
        (tmp_path / "files/s/1").rename(tmp_path / "files/s/moved")
        (tmp_path / "files/s/1").symlink_to(outside)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", exchange_first)
    store.delete(["s/1/a"])
    assert (outside / "a").read_text() == "kept"


def test_an_object_that_is_a_link_is_corrupt_and_not_read(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path / "files")
    stored = store.put("s/1/a", b"secret")
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "files/s/1/a").unlink()
    (tmp_path / "files/s/1/a").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptObject, match=r"s/1/a .*symbolic link"):
        store.read(stored)
    with pytest.raises(CorruptObject, match=r"s/1/a .*symbolic link"):
        store.read_range("s/1/a", 0, 6)
    assert list(store.list("")) == []
