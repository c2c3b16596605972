"""Redis servers: passwords, settings, restarts, and what else lies in them."""

import logging
import os
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.changelog.streamed_upload import HELD_BYTES
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.errors import Unreachable, UsageError
from siltstone.store.open import Warehouse, open_store
from siltstone.store.ranged import create_ranged
from tests.redis_server import RedisServer, shared_server
from tests.servers import REDIS_PASSWORD
from tests.store_cases_kv import open_tried_again

DATA = os.urandom(10_000)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password, which its tests stop, kill and start. It is older than WAITAOF: unless it syncs always,
    what it acknowledged may be in its memory alone, for seconds if the disk is busy."""
    server = RedisServer("--requirepass", REDIS_PASSWORD, "--appendfsync", "always")
    yield server
    server.remove()


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
    store = open_tried_again(url)
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


def test_uploads_are_tried_again_for_longer_than_other_calls(
    guarded: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILTSTONE_REDIS_PASSWORD", REDIS_PASSWORD)
    store, data = open_tried_again(guarded.url("attempts=1&retry=fixed&wait_s=0.02")), os.urandom(HELD_BYTES + 1000)
    with Uploader(store, UploadOptions()) as uploader:
        guarded.stop(kill=True)
        with pytest.raises(Unreachable):
            store.put("s/2/other", b"x")
        back = threading.Timer(0.3, guarded.start)
        back.start()
        with create_ranged(uploader, "s/2/base") as base:
            base.write(data)
        back.join()
        guarded.stop(kill=True)
        back = threading.Timer(0.3, guarded.start)
        back.start()
        manifest = uploader.put("s/2/manifest", DATA)
        back.join()
        taken = uploader.metrics.take()
    assert base.stored is not None and store.read(base.stored).to_pybytes() == data
    assert store.read(manifest).to_pybytes() == DATA
    assert (taken.requests, taken.objects, taken.failures) == (2, 2, 0) and taken.retries >= 2


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
            store.put("b", bytes(20_000_000))  # beside which the server's own buffers, which come and go, are nothing
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
