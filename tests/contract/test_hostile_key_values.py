"""Issue 11, item 3: what a writer of a key-value store's files or rows cannot bring its readers and sweeps to do."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from siltstone.errors import CorruptObject, UsageError
from siltstone.store.base import Unfinished
from siltstone.store.key_value import Header
from siltstone.store.open import open_store
from tests.redis_server import shared_server

NAME = "s/00000001/000000000001/manifest.arrow"
DATA = os.urandom(5000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "databases"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("file", ["rocksdict-config.json", "LOG", "LOCK", "CURRENT", "OPTIONS-000099.dbtmp"])
def test_a_link_within_a_rocksdb_leads_no_read_or_write_outside(root: Path, outside: Path, file: str) -> None:
    store = open_store(f"rocksdb://{root}")
    stored = store.put(NAME, DATA)
    planted = (root / NAME).parent / ".db" / file
    planted.unlink(missing_ok=True)
    planted.symlink_to(outside)
    with pytest.raises(CorruptObject, match=rf"{NAME}.*was altered.*{file} is no file but a link"):
        store.read(stored)
    with pytest.raises(CorruptObject):
        list(store.list("s/"))
    with pytest.raises(UsageError, match=file):
        store.put(NAME + "2", b"x")
    with pytest.raises(UsageError, match=file):
        store.delete([NAME])
    assert outside.read_text() == "precious"


def test_a_pipe_within_a_rocksdb_is_not_waited_for(root: Path) -> None:
    store = open_store(f"rocksdb://{root}")
    stored = store.put(NAME, DATA)
    planted = (root / NAME).parent / ".db/rocksdict-config.json"
    planted.unlink()
    os.mkfifo(planted)
    with pytest.raises(CorruptObject, match="is no file but a link, pipe or device"):
        store.read(stored)


@pytest.mark.server
def test_a_live_object_that_redis_calls_a_write_at_work_is_not_discarded() -> None:
    client, store = shared_server().client(), open_store(shared_server().url("prefix=live&chunk_bytes=1024"))
    stored = store.put(NAME, DATA)
    entry, _, key = NAME.rpartition("/")
    value = client.hget(f"live:{entry}", key)
    assert isinstance(value, bytes)
    header = Header.decode(value, NAME)
    assert header is not None
    client.hset("live:.writing", header.write_id.hex(), f"2020-01-01T00:00:00+00:00 {NAME}")
    [write] = store.unfinished("s/")
    store.discard([write])
    assert store.read(stored).to_pybytes() == DATA
    assert list(store.unfinished()) == [] and not client.exists("live:.writing")
    store.delete([NAME])


@pytest.mark.server
def test_rows_of_writes_at_work_that_make_no_sense_end_no_sweep() -> None:
    client, store = shared_server().client(), open_store(shared_server().url("prefix=rows&chunk_bytes=1024"))
    time, id = "2020-01-01T00:00:00+00:00", "0123456789abcdef"
    rows = [(id, v) for v in (b"x", b"yesterday a/b", b"2020-01-01T00:00:00 a/b", b"\xff\xfe x", b"")]
    rows += [(id, f"{time} tiny/../x".encode()), (id, b"0001-01-01T00:00:00+23:59 a/b")]
    rows += [(each, f"{time} a/b".encode()) for each in ("zz", id[2:], id.upper(), "01 23456789abcdef")]
    for token, value in rows:
        client.hset("rows:.writing", token, value)
        assert list(store.unfinished()) == [], (token, value)
        client.delete("rows:.writing")
    client.hset("rows:.writing", id, f"{time} a/b")
    assert list(store.unfinished()) == [Unfinished(id, "a/b", datetime(2020, 1, 1, tzinfo=UTC))]
    client.delete("rows:.writing")
