"""What only the key-value stores promise: limits, chunks, locks, and what a server says."""

import logging
import os
import signal
import socketserver
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rocksdict import Rdict

from siltstone.errors import CorruptObject, ObjectExists, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.store.checksums import checksum_of
from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import HEADER_BYTES, Header, chunk_key
from siltstone.store.keyvalue.rocksdb_database import database_options
from siltstone.store.open import Warehouse, open_store
from siltstone.store.retry import Retrying
from tests.redis_server import RedisServer, shared_server
from tests.servers import REDIS_PASSWORD, marked
from tests.store_cases_kv import factories

DATA = os.urandom(10_000)


@pytest.fixture(params=marked(["redis", "rocksdb"]))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return factories()[f"{request.param}-1k"](tmp_path).url


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password, which its tests stop and start."""
    server = RedisServer("--requirepass", REDIS_PASSWORD)
    yield server
    server.remove()


def _open(url: str) -> Retrying:
    store = open_store(url)
    assert isinstance(store, Retrying)
    return store


def _driver(store: Retrying) -> Any:
    assert isinstance(store.once, ChunkedStore)
    return store.once.driver


def test_stores_written_with_other_limits_read_alike(url: str) -> None:
    other = _open(url.replace("chunk_bytes=1024", "chunk_bytes=4096"))
    store = _open(url)
    stored = [store.put("s/1/a", DATA), other.put("s/1/b", DATA)]
    for each in (store, other, _open(url.replace("chunk_bytes=1024", "chunk_bytes=100000"))):
        assert [each.read(one).to_pybytes() for one in stored] == [DATA, DATA]
        assert each.read_range("s/1/b", 4000, 200).to_pybytes() == DATA[4000:4200]
        assert list(each.list("s/1/")) == [("s/1/a", 10_000), ("s/1/b", 10_000)]
    with pytest.raises(ObjectExists):
        _open(url.replace("chunk_bytes=1024", "chunk_bytes=100000")).put("s/1/a", DATA)


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
    with pytest.raises(UsageError, match=r"is no (Redis|RocksDB) URL: write"):
        open_store(text)


def test_delete_takes_the_chunks_and_the_entry_with_its_last_key(url: str, tmp_path: Path) -> None:
    store = _open(url)
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
    else:
        assert sorted(os.listdir(tmp_path / "databases")) == [".tmp"]
        assert os.listdir(tmp_path / "databases/.tmp") == []


def test_a_discarded_write_leaves_not_a_chunk(url: str, tmp_path: Path) -> None:
    store = _open(url)
    with pytest.raises(Unreachable, match=r"write .*discarded; start it again"), store.create("s/1/a") as writer:
        writer.write(DATA)
        [write] = store.unfinished("s/1/a")
        assert write.name == "s/1/a"
        assert list(store.unfinished("s/2/")) == []
        store.discard([write])
        writer.write(DATA)
    assert list(store.unfinished()) == []
    stored = store.put("s/1/a", DATA)
    store.discard([write])
    assert store.read(stored).to_pybytes() == DATA, "a write that ended is nothing to discard"
    store.delete(["s/1/a"])
    assert list(_driver(store).entries("")) == []


def test_a_damaged_chunk_is_noticed(url: str, tmp_path: Path) -> None:
    store = _open(url)
    stored = store.put("s/1/a", DATA)
    with _driver(store).reading("s/1") as get:
        [head] = get([b"a"], HEADER_BYTES)
    header = Header.decode(head, "a")
    assert header is not None and (header.chunk_bytes, header.last_chunk, header.last_chunk_bytes) == (1024, 9, 784)
    key = chunk_key(b"a", header.write_id, 3)
    for value, said in [(bytes(1024), "s/1/a.*checksum"), (b"x", "chunk 3 has 1 bytes"), (None, "chunk 3 of 10")]:
        if url.startswith("redis"):
            client, entry = shared_server().client(), url.partition("prefix=")[2].partition("&")[0] + ":s/1"
            client.hdel(entry, key) if value is None else client.hset(entry, key, value)  # type: ignore[arg-type]
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


def test_what_was_put_before_a_kill_is_there_and_what_was_staged_is_not(url: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), url], check=False)
    assert done.returncode == -signal.SIGKILL
    store = _open(url)
    assert list(store.list("")) == [("s/1/large", 50_000), ("s/1/small", 500)]
    [left] = store.unfinished("s/1/")
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
    assert len(list(_open(url).list("s/1/"))) == 15


def test_one_that_waits_too_long_for_a_lock_says_so(tmp_path: Path) -> None:
    store = _open(f"rocksdb://{tmp_path}?lock_wait_s=0.05")
    store.put("s/1/a", b"x")
    with _driver(store).reading("s/1"), pytest.raises(Unreachable, match=r"s/1.*locked") as caught:
        store.put("s/1/b", b"x")
    assert caught.value.transient
    assert store.put("s/1/b", b"x").bytes == 1


def test_a_rocksdb_that_is_gone_is_unreachable_and_a_broken_one_corrupt(tmp_path: Path) -> None:
    store = _open(f"rocksdb://{tmp_path}/objects")
    stored = store.put("s/1/a", b"x")
    [manifest] = (tmp_path / "objects/s/1/.db").glob("MANIFEST-*")
    manifest.write_bytes(b"nonsense")
    with pytest.raises(CorruptObject, match=r"s/1.*altered or cut"):
        store.read(stored)
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    with pytest.raises(Unreachable, match="is not there; mount or restore it"):
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
    assert list(_open(url).list("")) == []
    assert list(_open(url).unfinished()) == []


def test_wrong_credentials_are_refused_and_not_shown(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG", "wrong-word")
    monkeypatch.setenv("RIGHT", REDIS_PASSWORD)
    wrong = "password_variable=WRONG"
    for user, query in [("", ""), ("", wrong), ("nobody@", wrong)]:
        store = open_store(guarded.url(query, user))
        for call in (lambda s=store: s.put("a", b"x"), lambda s=store: s.check(writable=False)):
            with pytest.raises(Unreachable, match="refuses the credentials") as caught:
                call()
            assert not caught.value.transient
            assert "wrong-word" not in str(caught.value) + repr(store) + store.label
    good = open_store(guarded.url("password_variable=RIGHT"))
    good.check(writable=True)
    assert REDIS_PASSWORD not in repr(good) + good.label


def test_a_server_that_stops_and_comes_back(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_REDIS_PASSWORD", REDIS_PASSWORD)
    url = guarded.url("attempts=1000&retry=fixed&wait_s=0.02")
    store = _open(url)
    stored = store.put("s/1/a", DATA)
    guarded.stop()
    with pytest.raises(Unreachable, match=r"read.*cannot be reached.*check host and port") as caught:
        store.once.read(stored)
    assert caught.value.transient and caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    back = threading.Thread(target=lambda: (time.sleep(0.2), guarded.start()))
    back.start()
    assert store.read(stored).to_pybytes() == DATA
    back.join()
    latest = store.put("s/1/latest", DATA)
    guarded.stop(kill=True)
    back = threading.Thread(target=lambda: (time.sleep(0.1), guarded.start()))
    back.start()
    with store.create("s/1/b") as writer:
        writer.write(os.urandom(3 << 20))
    back.join()
    assert dict(store.list("s/1/"))["s/1/b"] == 3 << 20
    assert store.read(latest).to_pybytes() == DATA


@pytest.mark.server
def test_settings_that_lose_state_are_refused_or_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    server = RedisServer()
    client, store = server.client(), open_store(server.url("chunk_bytes=2000000"))
    try:
        client.config_set("maxmemory-policy", "allkeys-lru")
        store.check(writable=False)
        with pytest.raises(UsageError, match=r"may evict keys.*noeviction"):
            store.check(writable=True)
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("proto-max-bulk-len", 1 << 20)
        with pytest.raises(UsageError, match="chunk_bytes: set it to 1048576 or less"):
            store.check(writable=True)
        with pytest.raises(Unreachable, match=r"chunk_bytes|cannot be reached"):
            open_store(server.url("chunk_bytes=2000000&retry=none")).put("a", bytes(1_500_000))
        client.config_set("proto-max-bulk-len", 512 << 20)
        with caplog.at_level(logging.WARNING):
            Warehouse.at(server.url(f"local={tmp_path}")).prepare()
            assert caplog.messages == []
            client.config_set("maxmemory", 50 << 30)
            assert [remark.advice for remark in store.remarks()] == [None]
            client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.05))
            [full] = store.remarks()
            Warehouse.at(server.url(f"local={tmp_path}")).prepare()
            client.config_set("maxmemory", 0)
            client.config_set("appendonly", "no")
            Warehouse.at(server.url(f"local={tmp_path}")).prepare()
        assert full.advice is not None and "raise its maxmemory" in full.advice
        first, second = caplog.messages
        assert "once it is full, runs fail" in first and "keeps nothing on disk" in second
        client.config_set("maxmemory", 1)
        with pytest.raises(Unreachable, match="is full"):
            store.put("a", b"x")
        client.config_set("maxmemory", 0)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(Unreachable, match="read-only replica"):
            store.put("a", b"x")
        with pytest.raises(Unreachable, match="read-only replica"):
            store.check(writable=True)
    finally:
        server.remove()


@pytest.mark.server
def test_a_server_that_allows_no_questions_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN", "word")
    client, url = shared_server().client(), shared_server().url("prefix=asked&password_variable=PLAIN", "plain@")
    client.execute_command("ACL", "SETUSER", "plain", "on", ">word", "~asked:*", "+@all", "-config", "-info")
    store = open_store(url)
    store.check(writable=True)
    assert store.read(store.put("a", DATA)).to_pybytes() == DATA
    with pytest.raises(Unreachable, match="refuses the credentials"):
        open_store(shared_server().url("prefix=others&password_variable=PLAIN", "plain@")).put("a", b"x")


@pytest.mark.server
def test_what_else_lies_in_the_database_is_left_alone() -> None:
    client, store = shared_server().client(), open_store(shared_server().url("prefix=mine"))
    client.set("mine:s/1", "a string")
    client.hset("mine*:s/2", "a", "x")
    assert list(store.list("")) == []
    with pytest.raises(Unreachable, match="WRONGTYPE"):
        store.put("s/1/a", b"x")
    client.delete("mine:s/1", "mine*:s/2")


@pytest.mark.server
def test_scripts_forgotten_by_the_server_are_sent_again() -> None:
    store = open_store(shared_server().url("prefix=scripts&chunk_bytes=1024"))
    stored = store.put("s/1/a", DATA)
    shared_server().client().script_flush()
    assert store.put("s/1/b", DATA).checksum == stored.checksum
    store.delete(["s/1/a", "s/1/b"])
    assert list(store.list("")) == []


def _answers(lines: dict[bytes, bytes], seen: list[list[bytes]]) -> socketserver.ThreadingTCPServer:
    """A server that speaks Redis's protocol and answers by a command's name, OK where it is not in `lines`."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int(self.rfile.readline()[1:])
                    words.append(self.rfile.read(size + 2)[:size])
                seen.append(words)
                self.wfile.write(lines.get(words[0], b"+OK\r\n"))

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.server
@pytest.mark.parametrize("synced", [1, 0])
def test_a_write_waits_for_the_disk_where_the_server_can_say_so(synced: int) -> None:
    """The servers of these tests are older than WAITAOF (Redis 7.2): this one only speaks like a new one."""
    about = b"redis_version:7.2.4\r\naof_enabled:1\r\n"
    seen: list[list[bytes]] = []
    lines = {
        b"INFO": b"$%d\r\n%s\r\n" % (len(about), about),
        b"HSETNX": b":1\r\n",
        b"WAITAOF": b"*2\r\n:%d\r\n:0\r\n" % synced,
    }
    with _answers(lines, seen) as server:
        store = open_store(f"redis://127.0.0.1:{server.server_address[1]}/0?retry=none&timeout_s=10")
        if synced:
            assert store.put("s/1/a", b"x").bytes == 1
        else:
            with pytest.raises(Unreachable, match="did not bring a write to its disk") as caught:
                store.put("s/1/a", b"x")
            assert caught.value.transient
        server.shutdown()
    assert seen[-2:] == [[b"HSETNX", b"siltstone:s/1", b"a", b"x"], [b"WAITAOF", b"1", b"0", b"8000"]]


@pytest.mark.parametrize("kind", marked(["rocksdb", "redis"]))
def test_memory_is_taken_for_chunks_that_come_not_for_those_that_a_header_claims(kind: str, tmp_path: Path) -> None:
    """Issue 11, item 3: for 40 bytes that claimed a tebibyte, a tebibyte was allocated."""
    pool = pa.default_memory_pool()
    before = pool.max_memory() or 0
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
    assert (pool.max_memory() or 0) <= max(before, 256 << 20)
