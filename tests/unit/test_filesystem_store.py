"""What the filesystem store says when the disk will not do as asked."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.errors import CorruptObject, Unreachable
from siltstone.model import StoredObject
from siltstone.store.filesystem import FilesystemStore

ABSENT = StoredObject("s/1/a", 1, "xxh3-128:" + "00" * 16)


@pytest.fixture
def powerless(tmp_path: Path) -> Iterator[Path]:
    """A directory that this process may not write, root or not."""
    home = tmp_path / "closed"
    home.mkdir(mode=0o500)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield home
    finally:
        os.seteuid(was)


def test_no_permission_is_unreachable(powerless: Path) -> None:
    store = FilesystemStore(powerless / "objects")
    with pytest.raises(Unreachable, match=r"closed/objects/s: Permission denied; check the owner"):
        store.put("s/1/a", b"x")


def test_a_file_in_the_way_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = FilesystemStore(tmp_path / "file" / "objects")
    with pytest.raises(Unreachable, match="there is a file where a directory is needed"):
        store.put("s/1/a", b"x")
    with pytest.raises(Unreachable):
        store.read(ABSENT)
    assert (tmp_path / "file").read_text() == ""


def test_an_object_where_a_directory_is_needed_is_unreachable(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    store.put("s/1", b"x")
    with pytest.raises(Unreachable, match="there is a file where"):
        store.put("s/1/a", b"x")
    assert list(store.list("")) == [("s/1", 1)]


def test_a_store_that_is_gone_is_unreachable_and_a_lost_object_corrupt(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path / "objects")
    with pytest.raises(Unreachable, match="is missing"):
        store.read(ABSENT)
    stored = store.put("s/1/a", b"x")
    with pytest.raises(CorruptObject, match=r"s/1/b.*missing"):
        store.read(StoredObject("s/1/b", stored.bytes, stored.checksum))
    with pytest.raises(CorruptObject, match=r"s/1.*missing"):
        store.read(StoredObject("s/1", stored.bytes, stored.checksum))


FULL = """
    import resource, sys
    from pathlib import Path
    from siltstone.errors import Unreachable
    from siltstone.store.filesystem import FilesystemStore
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    store = FilesystemStore(Path(sys.argv[1]))
    store.put("s/1/small", bytes(100_000))
    try:
        store.put("s/1/big", bytes(100_001))
    except Unreachable as error:
        print(error)
"""


def test_no_room_is_unreachable_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "s/1/big" in said and "File too large; raise the limit" in said and said.count("\n") == 1
    assert list(FilesystemStore(tmp_path).list("")) == [("s/1/small", 100_000)]
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_nothing_temporary_stays_and_empty_directories_go(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    store.put("s/1/a", b"x")
    store.put("t/1/a", b"x")
    assert list((tmp_path / ".tmp").iterdir()) == []
    store.delete(["s/1/a"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp", "t"]


def test_objects_are_private_whatever_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        FilesystemStore(tmp_path).put("a", b"x")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
