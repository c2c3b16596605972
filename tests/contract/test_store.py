"""What every store promises (promise 6): written once, whole or absent, verified at each read."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle  # how Spark sends a store to its workers

from siltstone.errors import CorruptObject, ObjectExists, SiltstoneError, UsageError
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.open import open_store
from tests.examples import examples
from tests.servers import marked
from tests.store_cases import FACTORIES, Case


@pytest.fixture(params=marked(FACTORIES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return FACTORIES[request.param](tmp_path)


@pytest.fixture
def store(case: Case) -> Store:
    return case.open()


def _names(store: Store, prefix: str = "") -> list[str]:
    return [name for name, _ in store.list(prefix)]


def test_implements_the_protocol(store: Store) -> None:
    assert isinstance(store, Store)
    assert open_store(store.url).url == store.url


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(3_000_001)], ids=["empty", "one", "large"])
def test_put_then_read_from_elsewhere(case: Case, store: Store, data: bytes) -> None:
    stored = store.put("flights/00000001/a.b", data)
    assert stored == StoredObject("flights/00000001/a.b", len(data), checksum_of(data))
    assert case.open().read(stored).to_pybytes() == data


@pytest.mark.parametrize("wrap", [bytes, memoryview, pa.py_buffer], ids=["bytes", "memoryview", "buffer"])
def test_put_takes_any_bytes(store: Store, wrap: Callable[[bytes], bytes]) -> None:
    assert store.read(store.put("a", wrap(b"12345"))).to_pybytes() == b"12345"


def test_multibyte_memoryview_is_counted_in_bytes(store: Store) -> None:
    numbers = memoryview(bytes(range(16))).cast("q")
    assert store.put("a", numbers).bytes == 16


def test_put_never_overwrites(store: Store) -> None:
    stored = store.put("a/b", b"first")
    with pytest.raises(ObjectExists, match="a/b"):
        store.put("a/b", b"second")
    assert store.read(stored).to_pybytes() == b"first"


def test_create_appears_only_when_the_block_ends(store: Store) -> None:
    with store.create("a/b") as writer:
        assert writer.write(b"12") == 2
        writer.flush()
        writer.write(pa.py_buffer(b"345"))
        assert writer.stored is None
        assert _names(store) == []
    assert writer.stored == StoredObject("a/b", 5, checksum_of(b"12345"))
    assert writer.closed
    assert _names(store) == ["a/b"]


def test_create_leaves_nothing_after_an_error(store: Store) -> None:
    with pytest.raises(KeyError), store.create("a/b") as writer:
        writer.write(b"12")
        raise KeyError
    assert writer.stored is None
    assert _names(store) == []
    assert store.put("a/b", b"again").bytes == 5


def test_create_loses_to_an_object_put_meanwhile(store: Store) -> None:
    with pytest.raises(ObjectExists), store.create("a") as writer:
        writer.write(b"late")
        stored = store.put("a", b"early")
    assert store.read(stored).to_pybytes() == b"early"


def test_a_parquet_writer_can_write_to_it(store: Store) -> None:
    table = pa.table({"k": list(range(1000))})
    with store.create("t.parquet") as writer:
        pq.write_table(table, writer)
    assert writer.stored is not None
    assert pq.read_table(pa.BufferReader(store.read(writer.stored))).equals(table)


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_read_range_gives_exactly_those_bytes(case: Case, store: Store, size: int) -> None:
    data = os.urandom(size)
    store.put("s/1/a", data)
    for offset, length in [(0, size), (0, 1), (size - 1, 1), (size // 3, size // 2), (size // 2, 0)]:
        assert case.open().read_range("s/1/a", offset, length).to_pybytes() == data[offset : offset + length]
    with pytest.raises(CorruptObject, match="s/1/a"):
        store.read_range("s/1/a", size - 1, 2)
    with pytest.raises(CorruptObject, match=r"s/1/b.*missing"):
        store.read_range("s/1/b", 0, 1)


def test_an_open_store_can_be_sent_to_another_process(store: Store) -> None:
    stored = store.put("a", b"sent")
    assert cloudpickle.loads(cloudpickle.dumps(store)).read(stored).to_pybytes() == b"sent"


def test_a_store_never_written_can_be_checked_and_has_nothing_unfinished(store: Store) -> None:
    store.check(writable=True)
    assert list(store.list_unfinished()) == []


def test_list_is_in_name_order_and_by_prefix(store: Store) -> None:
    names = ["a", "b-1/x", "b.1/x", "b/1/y", "b/10", "b/2/x", "b0/x", "c"]
    for i, name in enumerate(reversed(names)):
        store.put(name, b"." * i)
    assert _names(store) == sorted(names)
    assert dict(store.list(""))["a"] == 7
    for prefix in ["b", "b/", "b/1", "b/1/", "b-1/x", "nothing", "b/2/x/y"]:
        assert _names(store, prefix) == sorted(n for n in names if n.startswith(prefix)), prefix


def test_list_of_a_store_never_written_is_empty(store: Store) -> None:
    assert _names(store) == []


def test_the_time_of_an_object_is_when_it_was_stored_where_the_store_keeps_times(case: Case, store: Store) -> None:
    before = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=1)  # file systems' clocks tick more slowly
    store.put("s/1/a", b"x")
    with store.create("s/1/b") as writer:
        writer.write(b"y" * 100_000)
    found = store.modified_at(["s/1/a", "s/1/b", "s/1/absent", "absent/too"])
    assert set(found) == (set() if case.url.startswith(("redis", "rocksdb", "cassandra")) else {"s/1/a", "s/1/b"})
    assert all(before <= time <= datetime.now(UTC) + timedelta(seconds=1) for time in found.values())
    assert store.modified_at([]) == store.modified_at(["s/2/a"]) == {}


def test_delete_is_idempotent_and_leaves_the_rest(store: Store) -> None:
    stored = [store.put(f"s/1/{i}", b"x") for i in range(3)] + [store.put("s/2/0", b"y")]
    store.delete(["s/1/0", "s/1/1", "s/1/2", "absent/too"])
    store.delete(["s/1/0"])
    assert _names(store) == ["s/2/0"]
    with pytest.raises(CorruptObject, match=r"s/1/0.*missing"):
        store.read(stored[0])
    assert store.put("s/1/0", b"new").bytes == 3


@pytest.mark.slow
def test_writers_and_deletes_in_one_directory_do_not_trip_each_other(store: Store) -> None:
    def churn(worker: int) -> None:
        for i in range(examples(40)):
            name = f"s/1/{worker}-{i}"
            store.put(name, b"x")
            store.delete([name])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert _names(store) == []


def test_missing_cut_and_altered_are_named(case: Case, store: Store) -> None:
    stored = store.put("s/1/a", b"0123456789")
    case.alter("s/1/a", b"01234567")
    with pytest.raises(CorruptObject, match=r"s/1/a .*8 bytes instead of 10"):
        store.read(stored)
    case.alter("s/1/a", b"0123456780")
    with pytest.raises(CorruptObject, match=r"s/1/a .*checksum"):
        store.read(stored)
    case.alter("s/1/a", b"")
    with pytest.raises(CorruptObject, match="0 bytes instead of 10"):
        store.read(stored)
    case.alter("s/1/a", None)
    with pytest.raises(CorruptObject, match=r"s/1/a .*missing"):
        store.read(stored)


@pytest.mark.slow
def test_every_altered_byte_is_noticed(case: Case, store: Store) -> None:
    data = bytearray(os.urandom(100))
    stored = store.put("a", bytes(data))
    for position in range(len(data)):
        data[position] ^= 1
        case.alter("a", bytes(data))
        with pytest.raises(CorruptObject):
            store.read(stored)
        data[position] ^= 1


BAD_NAMES = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "../a",
    ".",
    "a/./b",
    ".tmp/a",
    "a\\b",
    "a\0",
    "a b",
    "a\n",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_stay_inside(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        store.put(name, b"x")
    with pytest.raises(UsageError):
        store.read(replace(StoredObject("a", 1, "xxh3-128:" + "00" * 16), name=name))
    with pytest.raises(UsageError):
        store.delete([name])
    with pytest.raises(UsageError):
        store.modified_at([name])
    assert _names(store) == []


WRITER = """
    import sys
    from siltstone.errors import ObjectExists
    from siltstone.store.open import open_store
    url, name, data = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        open_store(url).put(name, data.encode() * 100_000)
        print("won")
    except ObjectExists:
        print("lost")
"""


def _spawn(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_many_processes_writing_one_name_exactly_one_wins(case: Case, store: Store) -> None:
    writers = [_spawn(WRITER, case.url, "s/1/one", str(i)) for i in range(4)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    outcomes = [writer.communicate("\n", timeout=300)[0].strip() for writer in writers]
    assert sorted(outcomes) == ["lost"] * 3 + ["won"]
    winner = str(outcomes.index("won")).encode() * 100_000
    [(name, size)] = store.list("")
    stored = StoredObject(name, size, checksum_of(winner))
    assert store.read(stored).to_pybytes() == winner


def test_of_many_threads_writing_one_name_exactly_one_wins(store: Store) -> None:
    def write(i: int) -> StoredObject | None:
        try:
            return store.put("s/1/one", bytes([i]) * 100_000)
        except ObjectExists:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [stored for stored in pool.map(write, range(8)) if stored]
    assert len(won) == 1
    assert store.read(won[0]).size == 100_000


SLOW_WRITER = """
    import sys
    from siltstone.store.open import open_store
    with open_store(sys.argv[1]).create("s/1/slow") as writer:
        while True:
            writer.write(b"x" * 65536)
            print("wrote", flush=True)
            sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_no_object(case: Case, store: Store) -> None:
    writer = _spawn(SLOW_WRITER, case.url)
    assert writer.stdout is not None and writer.stdout.readline() == "wrote\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert _names(store) == []
    for _ in range(2):
        left = list(store.list_unfinished("s/1/"))
        assert all(write.name in (None, "s/1/slow") for write in left)
        store.discard(left)
    assert list(store.list_unfinished()) == []
    assert store.put("s/1/slow", b"mine").bytes == 4


def test_a_discarded_write_that_is_still_at_work_stores_nothing(store: Store) -> None:
    with pytest.raises(SiltstoneError), store.create("s/1/a") as writer:
        writer.write(os.urandom(20_000_000))
        store.discard(left := list(store.list_unfinished()))
        assert left, "a write of that size is begun in the store before it ends"
    assert _names(store) == []


BUSY_WRITER = """
    import itertools, sys
    from siltstone.store.open import open_store
    store = open_store(sys.argv[1])
    for i in itertools.count():
        store.put(f"s/1/{i:06d}", i.to_bytes(4, "little") * 5000)
        print(i, flush=True)
"""


MOMENTS = (0.005, 0.02, 0.05)
"""how long a writer is at work, in seconds"""


def kills() -> Iterator[Any]:
    """Every store at every moment; but for a filesystem, `make test` kills on each store at one of them."""
    for kind, only in zip(FACTORIES, itertools.cycle(MOMENTS)):
        for after_s in MOMENTS:
            [param] = marked([kind], after_s)
            often = kind == "filesystem" or after_s == only
            marks = [*param.marks, *([] if often else [pytest.mark.thorough])]
            yield pytest.param(*param.values, marks=marks, id=f"{kind}-{after_s}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "after_s"), list(kills()), indirect=["case"])
def test_what_a_killed_writer_had_put_is_there_and_all_else_is_whole(case: Case, store: Store, after_s: float) -> None:
    writer = _spawn(BUSY_WRITER, case.url)
    assert writer.stdout is not None and writer.stdout.readline() == "0\n"
    time.sleep(after_s)
    writer.send_signal(signal.SIGKILL)
    acknowledged = writer.stdout.read().split("\n")[:-1]  # what readline read ahead too, which communicate leaves out
    writer.wait()
    found = list(store.list("s/1/"))
    assert len(found) - (len(acknowledged) + 1) in (0, 1)
    for i, (name, size) in enumerate(found):
        data = i.to_bytes(4, "little") * 5000
        assert store.read(StoredObject(name, size, checksum_of(data))).to_pybytes() == data
