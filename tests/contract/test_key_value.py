"""What only the key-value stores promise: limits, chunks, locks, and what a server says."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from rocksdict import Rdict

from siltstone.errors import CorruptObject, ObjectExists, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.store.checksums import checksum_of
from siltstone.store.keyvalue.protocol import HEADER_BYTES, Header, chunk_key
from siltstone.store.keyvalue.rocksdb_database import database_options
from siltstone.store.open import open_store
from tests.redis_server import shared_server
from tests.servers import marked
from tests.store_cases_kv import driver_of, factories, open_tried_again, with_cassandra

DATA = os.urandom(10_000)
KINDS = ["redis", "rocksdb", *(["cassandra"] if with_cassandra() else [])]


@pytest.fixture(params=marked(KINDS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return factories()[f"{request.param}-1k"](tmp_path).url


def test_stores_written_with_other_limits_read_alike(url: str) -> None:
    other = open_tried_again(url.replace("chunk_bytes=1024", "chunk_bytes=4096"))
    store = open_tried_again(url)
    stored = [store.put("s/1/a", DATA), other.put("s/1/b", DATA)]
    for each in (store, other, open_tried_again(url.replace("chunk_bytes=1024", "chunk_bytes=100000"))):
        assert [each.read(one).to_pybytes() for one in stored] == [DATA, DATA]
        assert each.read_range("s/1/b", 4000, 200).to_pybytes() == DATA[4000:4200]
        assert list(each.list("s/1/")) == [("s/1/a", 10_000), ("s/1/b", 10_000)]
    with pytest.raises(ObjectExists):
        open_tried_again(url.replace("chunk_bytes=1024", "chunk_bytes=100000")).put("s/1/a", DATA)


@pytest.mark.parametrize("text", ["chunk_bytes=1023", "chunk_bytes=536870913000", "chunk=1024", "chunk_bytes=x"])
def test_a_limit_that_makes_no_sense_is_refused(url: str, text: str) -> None:
    with pytest.raises(UsageError, match="chunk"):
        open_store(url.replace("chunk_bytes=1024", text))


def test_redis_takes_no_value_over_its_own_limit() -> None:
    with pytest.raises(UsageError, match=r"chunk_bytes: .*less than or equal to 536870912"):
        open_store("redis://127.0.0.1/0?chunk_bytes=536870913")


@pytest.mark.parametrize(
    "text", ["redis://", "redis://h/a", "redis://h/1/2", "redis://h/0#x", "rocksdb://", "rocksdb:///", "rocksdb://a/b"]
)
def test_a_url_that_names_no_store_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a (Redis|RocksDB) URL: write"):
        open_store(text)


def test_delete_takes_the_chunks_and_the_entry_with_its_last_key(url: str, tmp_path: Path) -> None:
    store = open_tried_again(url)
    for name in ("s/1/a", "s/1/b"):
        store.put(name, DATA)
    store.delete(["s/1/a"])
    assert list(store.list("")) == [("s/1/b", 10_000)]
    with pytest.raises(CorruptObject, match=r"s/1/a.*missing"):
        store.read_range("s/1/a", 0, 1)
    store.delete(["s/1/b"])
    if url.startswith("redis"):
        prefix = url.partition("prefix=")[2].partition("&")[0]
        assert list(shared_server().client().scan_iter(match=f"{prefix}*")) == []
    elif url.startswith("cassandra"):
        driver = driver_of(store)
        assert list(driver.entries("")) == []
        rows = driver.client.run("SELECT entry FROM siltstone_chunks")
        assert driver.partition_name("s/1") not in {row.entry for row in rows}
    else:
        assert sorted(os.listdir(tmp_path / "databases")) == [".tmp"]
        assert os.listdir(tmp_path / "databases/.tmp") == []


def test_a_discarded_write_leaves_not_a_chunk(url: str, tmp_path: Path) -> None:
    store = open_tried_again(url)
    with pytest.raises(Unreachable, match=r"write .*discarded; start it again"), store.create("s/1/a") as writer:
        writer.write(DATA)
        [write] = store.list_unfinished("s/1/a")
        assert write.name == "s/1/a"
        assert list(store.list_unfinished("s/2/")) == []
        store.discard([write])
        writer.write(DATA)
    assert list(store.list_unfinished()) == []
    stored = store.put("s/1/a", DATA)
    store.discard([write])
    assert store.read(stored).to_pybytes() == DATA, "a write that ended is nothing to discard"
    store.delete(["s/1/a"])
    assert list(driver_of(store).entries("")) == []


def test_a_damaged_chunk_is_noticed(url: str, tmp_path: Path) -> None:
    store = open_tried_again(url)
    stored = store.put("s/1/a", DATA)
    with driver_of(store).open_entry("s/1") as get:
        [head] = get([b"a"], HEADER_BYTES)
    header = Header.decode(head, "a")
    assert header is not None and (header.chunk_bytes, header.last_chunk, header.last_chunk_bytes) == (1024, 9, 784)
    key = chunk_key(b"a", header.write_id, 3)
    for value, said in [(bytes(1024), "s/1/a.*checksum"), (b"x", "chunk 3 has 1 bytes"), (None, "chunk 3 of 10")]:
        if url.startswith("redis"):
            client, entry = shared_server().client(), url.partition("prefix=")[2].partition("&")[0] + ":s/1"
            client.hdel(entry, key) if value is None else client.hset(entry, key, value)  # type: ignore[arg-type]
        elif url.startswith("cassandra"):
            driver = driver_of(store)
            where = "WHERE entry = ? AND key = ? AND write_id = ? AND part = 0 AND number = 3"
            row = (driver.partition_name("s/1"), b"a", header.write_id)
            driver.client.run(f"UPDATE siltstone_chunks USING TIMESTAMP 2 SET value = ? {where}", value, *row)
        else:
            database = Rdict(str(tmp_path / "databases/s/1/.db"), database_options())
            database.delete(key) if value is None else database.put(key, value)
            database.close()
        with pytest.raises(CorruptObject, match=said):
            store.read(stored)
    assert store.read_range("s/1/a", 0, 3072).to_pybytes() == DATA[:3072], "only the chunks it needs"


KILLED = """
    import os, signal, sys
    from siltstone.store.open import open_store
    store = open_store(sys.argv[1])
    store.put("s/1/small", b"s" * 500)
    store.put("s/1/large", b"l" * 50_000)
    with store.create("s/1/half") as writer:
        writer.write(b"h" * 50_000)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_was_put_before_a_kill_is_there_and_what_was_staged_is_not(url: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), url], check=False)
    assert done.returncode == -signal.SIGKILL
    store = open_tried_again(url)
    assert list(store.list("")) == [("s/1/large", 50_000), ("s/1/small", 500)]
    [left] = store.list_unfinished("s/1/")
    assert left.name == "s/1/half"
    assert store.put("s/1/half", b"again").bytes == 5
    store.discard([left])
    assert [name for name, _ in store.list("")] == ["s/1/half", "s/1/large", "s/1/small"]


MANY = """
    import sys
    from siltstone.store.open import open_store
    store = open_store(sys.argv[1])
    for i in range(5):
        store.put(f"s/1/{sys.argv[2]}-{i}", b"x" * 3000)
"""


@pytest.mark.slow
def test_processes_that_write_one_entry_wait_for_each_other(url: str) -> None:
    script = textwrap.dedent(MANY)
    writers = [subprocess.Popen([sys.executable, "-c", script, url, str(i)]) for i in range(3)]
    assert [writer.wait(30) for writer in writers] == [0, 0, 0]
    assert len(list(open_tried_again(url).list("s/1/"))) == 15


def test_one_that_waits_too_long_for_a_lock_says_so(tmp_path: Path) -> None:
    store = open_tried_again(f"rocksdb://{tmp_path}?lock_wait_s=0.05")
    store.put("s/1/a", b"x")
    with driver_of(store).open_entry("s/1"), pytest.raises(Unreachable, match=r"s/1.*locked") as caught:
        store.put("s/1/b", b"x")
    assert caught.value.transient
    assert store.put("s/1/b", b"x").bytes == 1


def test_a_rocksdb_that_is_gone_is_unreachable_and_a_broken_one_corrupt(tmp_path: Path) -> None:
    store = open_tried_again(f"rocksdb://{tmp_path}/objects")
    stored = store.put("s/1/a", b"x")
    [manifest] = (tmp_path / "objects/s/1/.db").glob("MANIFEST-*")
    manifest.write_bytes(b"nonsense")
    with pytest.raises(CorruptObject, match=r"s/1.*altered or cut"):
        store.read(stored)
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    with pytest.raises(Unreachable, match="is missing; mount or restore it"):
        store.read(stored)
    (tmp_path / "objects").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        store.check(writable=True)


CLOSED = """
    import os, sys
    from siltstone.errors import Unreachable
    from siltstone.store.open import open_store
    store = open_store(sys.argv[1])
    stored = store.put("s/1/a", b"x")
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        for folder, _, _ in os.walk(sys.argv[2], topdown=False):
            os.chmod(folder, 0o555)
    for call in (
        lambda: store.put("s/1/b", b"x"),
        lambda: store.put("s/2/a", b"x"),
        lambda: store.put("s/2/b", bytes(2_000_000)),
        lambda: store.delete(["s/1/a"]),
        lambda: store.read(stored),
    ):
        try:
            call()
        except Unreachable as error:
            print(error)
"""


@pytest.mark.slow
def test_no_permission_is_unreachable() -> None:
    with tempfile.TemporaryDirectory() as home:  # one that other users can look into
        os.chmod(home, 0o755)
        command = [sys.executable, "-c", textwrap.dedent(CLOSED), f"rocksdb://{home}/objects", f"{home}/objects"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for folder, _, _ in os.walk(home):
            os.chmod(folder, 0o755)
    assert said.count("\n") == 5, said
    assert all("check" in line and "permissions" in line for line in said.splitlines()), said


FULL = """
    import resource, sys
    from siltstone.errors import Unreachable
    from siltstone.store.open import open_store
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    store = open_store(sys.argv[1])
    for size in (500_000, 2_000_000):
        try:
            store.put(f"s/1/{size}", bytes(size))
        except Unreachable as error:
            print(error)
"""


@pytest.mark.slow
def test_no_room_is_unreachable_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"rocksdb://{tmp_path}"
    command = [sys.executable, "-c", textwrap.dedent(FULL), url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("raise the limit on file size") == said.count("\n") == 2, said
    assert "object s/1/500000" in said and "object s/1/2000000" in said
    assert list(open_tried_again(url).list("")) == []
    assert list(open_tried_again(url).list_unfinished()) == []


@pytest.mark.parametrize("kind", marked(KINDS))
def test_memory_is_taken_for_chunks_that_come_not_for_those_that_a_header_claims(kind: str, tmp_path: Path) -> None:
    """Issue 11, item 3: for 40 bytes that claimed a tebibyte, a tebibyte was allocated."""
    pool = pa.default_memory_pool()
    held, before = pool.bytes_allocated(), pool.max_memory() or 0
    case = factories()[kind](tmp_path)
    store = case.open()
    store.put("a/b", b"x")
    header = Header(1 << 31, 511, 1 << 31, bytes(8))
    case.alter("a/b", header.encode())
    for read in (
        lambda: store.read(StoredObject("a/b", header.value_bytes, checksum_of(b""))),
        lambda: store.read_range("a/b", 5, header.value_bytes - 5),
    ):
        with pytest.raises(CorruptObject, match=r"a/b .* is cut: its chunk 0 of 512 is missing"):
            read()
    assert (pool.max_memory() or 0) <= max(before, held + (256 << 20))
