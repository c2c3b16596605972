"""A real Cassandra that is killed, frozen and asked too much, and writers that are killed (`make test-cassandra`)."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from siltstone.errors import ObjectExists, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.restore.proof import plan_checkpoints
from siltstone.restore.verify import prove
from siltstone.store.keyvalue.cassandra import CassandraKeyValue
from siltstone.store.keyvalue.cassandra_client import CassandraClient
from siltstone.store.keyvalue.protocol import CHUNK, HEADER_BYTES, Header, chunk_key, chunk_stem
from siltstone.store.open import Warehouse, open_store
from siltstone.store.retry import Retrying
from tests import tiny_stream
from tests.cassandra_server import CassandraServer, shared_cassandra
from tests.store_cases_kv import driver_of, open_tried_again

pytestmark = [pytest.mark.server, pytest.mark.slow]
PATIENT = "attempts=1000&retry=fixed&wait_s=0.3"
DATA = os.urandom(10_000)


@pytest.fixture(scope="module")
def mortal() -> Iterator[CassandraServer]:
    """A server that its tests kill and freeze."""
    server = CassandraServer()
    yield server
    server.remove()


def new_store(query: str = "", server: CassandraServer | None = None) -> Retrying:
    return open_tried_again((server or shared_cassandra()).url(f"prefix={uuid.uuid4().hex}&{query}"))


def chunks_of(store: Retrying) -> set[tuple[str, bytes, bytes]]:
    """(entry, key, write id) of every chunk of a store."""
    driver: CassandraKeyValue = driver_of(store)
    rows = driver.client.run("SELECT entry, key, write_id FROM siltstone_chunks")
    return {(r.entry, r.key, r.write_id) for r in rows if r.entry.startswith(driver.partition_name(""))}


def led_to(store: Retrying) -> set[tuple[str, bytes, bytes]]:
    """The same of all that a header or a row of a write in progress leads to."""
    driver: CassandraKeyValue = driver_of(store)
    rows = driver.client.run("SELECT entry, key, value FROM siltstone_objects")
    found = set()
    for row in (row for row in rows if row.entry.startswith(driver.partition_name(""))):
        header = Header.decode(row.value, "a row") if row.value is not None else None
        if row.key.startswith(CHUNK):
            found.add((row.entry, row.key[1:-9], row.key[-8:]))
        elif header is not None:
            found.add((row.entry, row.key, header.write_id))
    return found


def kill_before_request(work: Callable[[], object], number: int) -> int:
    """Do `work` in a forked child that is killed right before its request of that number; -9, or 0 if it ended."""
    child = os.fork()
    if child == 0:
        made = 0

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def request(*arguments: object, **options: object) -> object:
                nonlocal made
                made += 1
                if made == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return request

        code = 1
        try:
            for name in ("run", "run_all", "run_batch"):
                setattr(CassandraClient, name, counted(getattr(CassandraClient, name)))
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def put(store: Retrying) -> None:
    store.put("s/1/a", DATA)


def delete(store: Retrying) -> None:
    store.delete(["s/1/a", "s/1/b"])


def discard(store: Retrying) -> None:
    store.discard(list(store.list_unfinished()))


@pytest.mark.parametrize("work", [put, delete, discard])
def test_a_process_killed_at_any_request_leaves_objects_whole_and_no_chunk_unlisted(
    work: Callable[[Retrying], None],
) -> None:
    moments = 0
    while True:
        store = new_store("chunk_bytes=1024")
        if work is delete:
            put(store)
            store.put("s/1/b", b"plain")
        if work is discard:
            assert kill_before_request(lambda s=store: put(s), 4) == -signal.SIGKILL, "before the commit"
            assert len(list(store.list_unfinished())) == 1 and chunks_of(store)
        moments += 1
        ended = kill_before_request(lambda s=store: work(s), moments)
        assert chunks_of(store) <= led_to(store)
        there = dict(store.list(""))
        for name, size in there.items():
            data = store.read_range(name, 0, size).to_pybytes()
            assert data == (DATA if name == "s/1/a" else b"plain")
        for _ in range(2):
            store.discard(list(store.list_unfinished()))
        assert dict(store.list("")) == there and list(store.list_unfinished()) == []
        assert {key for _, key, _ in chunks_of(store)} == ({b"a"} if "s/1/a" in there else set())
        work(store) if work is not put or not there else None
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert moments >= 4


def test_chunks_that_arrive_after_their_write_was_discarded_are_deleted_already() -> None:
    store = new_store("chunk_bytes=1024")
    driver: CassandraKeyValue = driver_of(store)
    id = os.urandom(8)
    staged = driver.stage("s/1", b"a", id)
    assert staged is not None
    chunks = [(chunk_key(b"a", id, number), memoryview(DATA)[:1024]) for number in range(200)]
    staged.put(chunks[:100])
    [write] = store.list_unfinished()
    store.discard([write])
    with pytest.raises(Unreachable, match="was discarded; start it again"):
        staged.put(chunks[100:])
    with pytest.raises(Unreachable, match="was discarded; start it again"):
        staged.commit(Header(1024, 199, 1024, id).encode())
    assert chunks_of(store) == set() and list(store.list("")) == []


def test_a_live_object_that_a_planted_row_calls_a_write_in_progress_is_not_discarded() -> None:
    store = new_store("chunk_bytes=1024")
    driver: CassandraKeyValue = driver_of(store)
    stored = store.put("s/1/a", DATA)
    with driver.open_entry("s/1") as get:
        [value] = get([b"a"], HEADER_BYTES)
    assert isinstance(value, bytes)
    header = Header.decode(value, "a")
    assert header is not None
    insert = "INSERT INTO siltstone_objects (entry, shard, key, began, dropped) VALUES (?,?,?,?,?) IF NOT EXISTS"
    place = driver.place_of("s/1", b"a")
    for key in (chunk_stem(b"a", header.write_id), b"\0", b"\0..\0" + bytes(8), b"\0\xff\0" + bytes(8), b"\xff"):
        assert driver.client.run(insert, *place, key, int(time.time() * 1000), False).was_applied
    [write] = store.list_unfinished()
    store.discard([write])
    assert store.read(stored).to_pybytes() == DATA and list(store.list_unfinished()) == []
    assert list(store.list("")) == [("s/1/a", len(DATA))]


def test_a_server_killed_in_the_middle_of_writes_loses_none_that_it_confirmed(mortal: CassandraServer) -> None:
    store, confirmed, stop = new_store(f"{PATIENT}&timeout_s=3", mortal), dict[str, StoredObject](), threading.Event()

    def write(worker: int) -> None:
        for i in range(10_000):
            if stop.is_set():
                return
            size = 600_000 if i % 3 == 0 else 2000
            name = f"s/1/{worker}-{i}"
            confirmed[name] = store.put(name, bytes([worker, i % 256]) * (size // 2))

    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(2):
        time.sleep(1)
        mortal.kill()
        with pytest.raises(Unreachable, match=r"cannot be reached|in time|may pass") as caught:
            store.once.put("s/2/alone", b"x")
        assert caught.value.transient and "\n" not in str(caught.value)
        mortal.start()
        count = len(confirmed)
        end = time.monotonic() + 60
        while len(confirmed) < count + 10 and time.monotonic() < end:
            time.sleep(0.1)
    stop.set()
    for writer in writers:
        writer.join()
    assert len(confirmed) > 20
    assert dict(store.list("s/1/")) == {name: stored.bytes for name, stored in confirmed.items()}
    for name, stored in confirmed.items():
        worker, i = (int(part) for part in name.rpartition("/")[2].split("-"))
        assert store.read(stored).to_pybytes() == bytes([worker, i % 256]) * (stored.bytes // 2)
    assert chunks_of(store) <= led_to(store)


def test_a_transaction_without_an_answer_is_looked_up(mortal: CassandraServer) -> None:
    """A frozen server answers no one, and does what it was asked once it goes on."""
    store = new_store(f"{PATIENT}&timeout_s=1", mortal)
    store.put("s/1/first", b"x")
    for size in (100, 600_000):
        data = os.urandom(size)
        mortal.freeze()
        thaw = threading.Timer(4, mortal.thaw)
        thaw.start()
        with pytest.raises(Unreachable, match="answer in time") as caught:
            store.once.put(f"s/1/once-{size}", data)
        assert caught.value.transient
        stored = store.put(f"s/1/{size}", data)
        thaw.join()
        assert store.read(stored).to_pybytes() == data
        with pytest.raises(ObjectExists):
            store.put(f"s/1/{size}", b"other")
    assert {f"s/1/{size}" for size in (100, 600_000)} <= dict(store.list("s/1/")).keys()
    assert chunks_of(store) <= led_to(store)


def test_credentials_rights_and_keyspaces_that_are_wrong_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    server = CassandraServer(guarded=True)
    tls = f"tls=true&ca_file={server.certificate}&"
    try:
        monkeypatch.setenv("WRONG", "wrong-word")
        monkeypatch.setenv("SILTSTONE_CASSANDRA_PASSWORD", "cassandra")
        good = open_store(server.url(tls, "cassandra@"))
        good.check(writable=True)
        stored = good.put("a/b", b"x")
        with server.session() as session:
            session.execute("CREATE ROLE reader WITH PASSWORD = 'cassandra' AND LOGIN = true")
            session.execute("GRANT SELECT ON KEYSPACE warehouses TO reader")
        reader = open_store(server.url(tls, "reader@"))
        assert reader.read(stored).to_pybytes() == b"x" and list(reader.list("")) == [("a/b", 1)]
        assert reader.remarks()
        wrong = open_store(server.url(f"{tls}password_variable=WRONG&attempts=1", "cassandra@"))
        nobody = open_store(server.url(f"{tls}attempts=1"))
        for call in (lambda: reader.put("a/c", b"x"), lambda: wrong.check(writable=False), lambda: nobody.read(stored)):
            with pytest.raises(Unreachable, match="refuses the credentials") as caught:
                call()
            assert not caught.value.transient and "wrong-word" not in str(caught.value)
        for query in ("tls=true&", ""):  # an unknown certificate; no TLS at all
            with pytest.raises(Unreachable, match="cannot be reached; check hosts, port and tls"):
                open_store(server.url(f"{query}retry=none", "cassandra@")).check(writable=False)
        with pytest.raises(UsageError, match="cannot read the file that option ca_file names"):
            open_store(server.url("tls=true&ca_file=/absent", "cassandra@")).check(writable=False)
        elsewhere = open_store(server.url(tls, "cassandra@").replace("/warehouses", "/absent"))
        with pytest.raises(UsageError, match="no such keyspace; make it with CREATE KEYSPACE"):
            elsewhere.check(writable=False)
        assert "cassandra'" not in repr(good) and "wrong-word" not in repr(wrong)
    finally:
        server.remove()


def test_a_stream_keeps_its_state_there_over_a_kill_of_the_server(
    mortal: CassandraServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tiny_stream.RegionRun.step

    def step(run: tiny_stream.RegionRun, *arguments: object, **options: object) -> object:
        mortal.kill()
        back = threading.Thread(target=mortal.start)
        back.start()
        try:
            return real(run, *arguments, **options)  # type: ignore[arg-type]  # passed on as they came
        finally:
            back.join()

    url = mortal.url(f"prefix={uuid.uuid4().hex}&{PATIENT}&local={tmp_path}/local")
    monkeypatch.setattr(tiny_stream.RegionRun, "step", step)
    with tiny_stream.written(url) as stored:
        proof = plan_checkpoints(stored.place, tiny_stream.NAME, list(range(1, tiny_stream.LAST + 1)))
        store = stored.place.warehouse.store
        assert not proof.failures and len(proof.tasks) > 0
        assert [failure for task in proof.tasks for failure in prove(store, task).failures] == []
        read = tiny_stream.readers(stored, tiny_stream.LAST, tmp_path / "out")
        compared: Any = read["verify --deep"]()
        assert compared and all(same for same, _ in compared)
    assert Warehouse.at(url).store.label in url
