"""Issue 11, item 3: what a writer of a key-value store's files or rows cannot bring its readers and sweeps to do."""

import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rocksdict import Rdict

from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.store.base import Unfinished
from siltstone.store.keyvalue.protocol import MAGIC, Header, chunk_key
from siltstone.store.keyvalue.rocksdb_database import database_options
from siltstone.store.open import open_store
from tests import tiny_stream
from tests.proofs import in_order
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
    with pytest.raises(CorruptObject, match=rf"{NAME}.*was altered.*{file} is a link, pipe or device"):
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
    with pytest.raises(CorruptObject, match="is a link, pipe or device"):
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
    [write] = store.list_unfinished("s/")
    store.discard([write])
    assert store.read(stored).to_pybytes() == DATA
    assert list(store.list_unfinished()) == [] and not client.exists("live:.writing")
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
        assert list(store.list_unfinished()) == [], (token, value)
        client.delete("rows:.writing")
    client.hset("rows:.writing", id, f"{time} a/b")
    assert list(store.list_unfinished()) == [Unfinished(id, "a/b", datetime(2020, 1, 1, tzinfo=UTC))]
    client.delete("rows:.writing")


@pytest.mark.parametrize("file", ["chunks.sst", "head.sst"])
def test_a_link_among_a_write_s_table_files_leads_nowhere(root: Path, outside: Path, file: str) -> None:
    store = open_store(f"rocksdb://{root}?chunk_bytes=1024")
    with pytest.raises(Unreachable, match=f"write object {NAME}"), store.create(NAME) as writer:
        writer.write(DATA)
        [folder] = (root / ".tmp").iterdir()
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(outside)
    assert outside.read_text() == "precious"
    assert list(store.list("")) == [] and list(store.list_unfinished()) == []


def _comparator(database: Path) -> None:
    (database / "rocksdict-config.json").write_text('{"raw_mode":false,"prefix_extractors":{}}')


def _config(database: Path) -> None:
    (database / "rocksdict-config.json").unlink()
    (database / "rocksdict-config.json").mkdir()


def _current(database: Path) -> None:
    (database / "CURRENT").write_text("MANIFEST-000099\n")


def _manifest(database: Path) -> None:
    for path in database.glob("MANIFEST*"):
        path.unlink()


def _linked(database: Path) -> None:
    database.rename(database.parents[4] / "moved")
    database.symlink_to(database.parents[4] / "moved")


@pytest.mark.parametrize("alter", [_comparator, _config, _current, _manifest, _linked])
def test_an_altered_rocksdb_is_damage_and_no_outage(root: Path, alter: Callable[[Path], None]) -> None:
    store = open_store(f"rocksdb://{root}?lock_wait_s=1")
    stored = store.put(NAME, DATA)
    alter((root / NAME).parent / ".db")
    with pytest.raises(CorruptObject, match=NAME):
        store.read(stored)


def test_a_rocksdb_whose_root_is_away_is_an_outage_and_no_damage(root: Path) -> None:
    store = open_store(f"rocksdb://{root}?lock_wait_s=1")
    stored = store.put(NAME, DATA)
    root.rename(root.with_name("away"))
    with pytest.raises(Unreachable):
        store.read(stored)


def test_the_name_of_a_write_at_work_is_unknown_where_it_makes_no_sense(root: Path, outside: Path) -> None:
    store = open_store(f"rocksdb://{root}")
    name = root / ".tmp/0123456789abcdef/name"
    name.parent.mkdir(parents=True)
    outside.write_text("a/b")
    makers: list[Callable[[], object]] = [
        lambda: os.mkfifo(name),
        lambda: name.symlink_to(outside),
        lambda: name.write_bytes(b"\xff"),
        lambda: name.write_text("../a"),
        lambda: name.write_bytes(b"a" * (1 << 20)),
    ]
    for make in makers:
        make()
        assert [(write.token, write.name) for write in store.list_unfinished()] == [(name.parent.name, None)]
        name.unlink()
    name.write_text("a/b")
    assert [write.name for write in store.list_unfinished("a/")] == ["a/b"]


@pytest.mark.slow
def test_recovery_goes_back_behind_an_altered_rocksdb(tmp_path: Path) -> None:
    """Though neither a deletion nor a sweep can list what is left in it."""
    last, name = tiny_stream.LAST, tiny_stream.NAME
    with tiny_stream.written(f"rocksdb://{tmp_path}/w?lock_wait_s=1") as stream:
        place = stream.place
        entry = place.catalog.checkpoints.get(name, last).manifest.name.rpartition("/")[0]
        (tmp_path / "w" / "objects" / entry / ".db" / "CURRENT").write_text("MANIFEST-000099\n")
        done = recover(place, name, run=in_order)
        assert (done.given_up, done.checkpoint) == ((last,), last - 1)


@contextmanager
def _at_most(size: int) -> Iterator[None]:
    """What the block takes by Python, of which a client's answers are made, stays below `size` bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def _header_of(value: object) -> Header:
    assert isinstance(value, bytes)
    header = Header.decode(value, NAME)
    assert header is not None
    return header


@pytest.mark.server
@pytest.mark.parametrize("user", ["", "reader"])
def test_a_value_in_redis_that_is_too_long_is_not_fetched(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of 250 MiB planted for an object of 2,000 bytes took 600 MiB; also who may run no script is spared it."""
    client, query = shared_server().client(), f"prefix=long{user}&chunk_bytes=1024"
    entry, _, key = NAME.rpartition("/")
    place, long = f"long{user}:{entry}", bytes(64 << 20)
    writer = open_store(shared_server().url(query))
    plain, chunked = writer.put(NAME + "1", DATA[:500]), writer.put(NAME + "2", DATA)
    if user:
        client.execute_command("ACL", "SETUSER", user, "on", ">word", "~long*", "+@read", "+@connection", "-@scripting")
        monkeypatch.setenv("SILTSTONE_REDIS_PASSWORD", "word")
    store = open_store(shared_server().url(query, f"{user}@" if user else ""))
    assert store.read(plain).to_pybytes() == DATA[:500] and store.read(chunked).to_pybytes() == DATA
    header = _header_of(client.hget(place, key + "2"))
    client.hset(place, key + "1", long)
    client.hset(place, chunk_key(key.encode() + b"2", header.write_id, 1), long)
    with _at_most(4 << 20):
        with pytest.raises(CorruptObject, match=f"has {len(long)} bytes instead of 500"):
            store.read(plain)
        with pytest.raises(CorruptObject, match=f"its chunk 1 has {len(long)} bytes, not 1024"):
            store.read(chunked)
        with pytest.raises(CorruptObject, match=f"its chunk 1 has {len(long)} bytes"):
            store.read_range(chunked.name, 0, 4000)
        assert dict(store.list(entry)) == {plain.name: len(long), chunked.name: chunked.bytes}
    client.delete(place)


@pytest.mark.server
def test_a_row_of_a_write_at_work_that_is_too_long_is_not_fetched() -> None:
    client, store = shared_server().client(), open_store(shared_server().url("prefix=rows2"))
    client.hset("rows2:.writing", "0123456789abcdef", bytes(64 << 20))
    with _at_most(4 << 20):
        assert list(store.list_unfinished()) == []
    client.delete("rows2:.writing")


@pytest.mark.slow
def test_values_in_rocksdb_that_are_too_long_are_not_in_memory_together(root: Path) -> None:
    """RocksDB reads a value whole; how many at once is ours to say."""
    store = open_store(f"rocksdb://{root}?chunk_bytes=1024")
    stored = store.put(NAME, os.urandom(100_000))
    database = Rdict(str((root / NAME).parent / ".db"), database_options())
    key = NAME.rpartition("/")[2].encode()
    header = _header_of(database.get(key))
    for number in range(90):
        database.put(chunk_key(key, header.write_id, number), bytes(1 << 20))
    database.close()
    with _at_most(40 << 20), pytest.raises(CorruptObject, match="its chunk 0 has 1048576 bytes, not 1024"):
        store.read(stored)


def test_a_header_of_chunks_smaller_than_any_store_makes_is_refused() -> None:
    """Chunks of a byte would take a row, and a key of some dozen bytes, each."""
    assert _header_of(Header(1024, 3, 5, bytes(8)).encode()).value_bytes == 3077
    with pytest.raises(CorruptObject, match="the header of its chunks"):
        Header.decode(Header(1023, 3, 5, bytes(8)).encode(), NAME)
    assert Header.decode(MAGIC, NAME) is None
