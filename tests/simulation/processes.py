"""Processes, a store, a catalog and a clock in memory, so that a schedule decides what happens after what.

A process is a thread that runs only while the schedule lets it, and stops before every transaction of the catalog and
every call of the store. There it may be killed: then nothing it does afterwards, in `finally` or `except`, reaches
anything. Or it may be left for as long as the schedule likes, and wake up as a zombie. Or the call may fail, before or
after it did what it was asked to.
"""

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pyarrow as pa
from sqlalchemy import Connection, Engine, StaticPool, create_engine, event

from siltstone.catalog.database.engine import WRITE
from siltstone.catalog.database.transactions import Transactions
from siltstone.catalog.database.upgrade import create_tables
from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import Remark, Unfinished
from siltstone.store.checksums import DEFAULT, checksum_of

FORGETS = 5
"""maximum transactions that a failover loses"""
NOON = datetime(2013, 7, 4, 12, tzinfo=UTC)


class Killed(BaseException):
    """The process is dead: this is how its thread learns of it."""


class Clock:
    """The time of all, which moves a little whenever it is looked at, and when the schedule says so."""

    def __init__(self) -> None:
        self.time = NOON

    def now(self) -> datetime:
        self.time += timedelta(milliseconds=1)
        return self.time


class Process:
    """Runs `work(process)` in a thread, from stop to stop."""

    def __init__(self, kind: str, stream: str, work: "Callable[[Process], Any]") -> None:
        self.kind, self.stream = kind, stream
        self.ended = False
        self.dead = False
        self.error: BaseException | None = None
        self.epoch = 0
        """the writer epoch it acts for, 0 before it knows"""
        self.excused = False
        """it may fail as it does"""
        self.fault = ""
        """`before` or `after`: how the next call fails"""
        self._work = work
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.dead:
                self._work(self)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()

    def resume(self, stops: int) -> None:
        """Let it run on, past some stops."""
        for _ in range(stops):
            if self.ended:
                return
            self._go.release()
            self._stopped.acquire()

    def finish(self) -> None:
        """Let it run to its end."""
        while not self.ended:
            self.resume(1000)

    def kill(self) -> None:
        """It does nothing any more."""
        self.dead = True
        self.finish()
        self._thread.join()

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """A call that this process makes: it stops before it."""
        if threading.current_thread() is self._thread:
            self._stop()
            if self.fault == "before":
                self.fault = ""
                raise Unreachable(f"cannot {what}: the schedule says so")
        yield
        if threading.current_thread() is self._thread and self.fault == "after":
            self.fault = ""
            raise Unreachable(f"cannot tell whether {what} was done: the schedule says so")

    def _stop(self) -> None:
        if not self.dead:
            self._stopped.release()
            self._go.acquire()
        if self.dead:
            raise Killed


def memory_engine() -> tuple[Engine, sqlite3.Connection]:
    """An engine over one SQLite database in memory, with the catalog's tables, and its only connection."""
    raw = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    engine = create_engine("sqlite://", creator=lambda: raw, poolclass=StaticPool)

    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get(WRITE)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    event.listen(engine, "begin", begin)
    create_tables(engine)
    raw.execute("PRAGMA foreign_keys = ON")
    return engine, raw


class Database:
    """A database in memory with the catalog's tables, made once for each name, and empty to begin with."""

    _made: ClassVar[dict[str, tuple[Engine, sqlite3.Connection, bytes]]] = {}

    def __init__(self, name: str) -> None:
        if name not in self._made:
            engine, raw = memory_engine()
            self._made[name] = engine, raw, raw.serialize()
        self.engine, self.raw, empty = self._made[name]
        self.load(empty)

        self.before = deque[bytes](maxlen=FORGETS)
        """what it held before each of its newest transactions, the newest last"""

    def load(self, data: bytes) -> None:
        """Hold what another one did when it was serialized."""
        self.raw.deserialize(data)
        self.raw.execute("PRAGMA foreign_keys = ON")

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Remember what it held before a transaction, if that succeeds."""
        before = self.raw.serialize()
        yield
        self.before.append(before)


class SimulatedTransactions(Transactions):
    """The catalog's transactions as one process sees them: it stops before every one."""

    def __init__(
        self, engine: Engine, now: Callable[[], datetime], process: Process, database: Database | None = None
    ) -> None:
        super().__init__(engine, now, outage_s=0.0)
        self._process, self._database = process, database

    @contextmanager
    def begin_read(self) -> Iterator[Connection]:
        with self._process.call("read the catalog"), super().begin_read() as connection:
            yield connection

    @contextmanager
    def begin_write(self, what: str) -> Iterator[Connection]:
        remembering = nullcontext() if self._database is None else self._database.remembering()
        with self._process.call(f"write {what}"), remembering, super().begin_write(what) as connection:
            yield connection


class MemoryStore:
    """What all processes store; `SimulatedStore` is how one of them uses it."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.begun: dict[str, Unfinished] = {}
        self.may_delete: Callable[[str], bool] = lambda _: True
        """asked before every deletion of an object that is there"""
        self._writes = 0

    def begin(self, name: str) -> Unfinished:
        self._writes += 1
        write = Unfinished(f"w{self._writes}", name, self.now())
        self.begun[write.token] = write
        return write


class _Writer:
    def __init__(self) -> None:
        self.stored: StoredObject | None = None
        self.closed = False
        self.data = bytearray()

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        self.data += memoryview(data)
        return len(memoryview(data))

    def flush(self) -> None:
        pass


class SimulatedStore:
    """The store as one process sees it (`siltstone.store.base.Store`)."""

    url = label = "memory"
    ranged = True
    checksums = DEFAULT

    def __init__(self, memory: MemoryStore, process: Process | None = None) -> None:
        self._memory, self._process = memory, process

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        if self._process is None:
            yield
        else:
            with self._process.call(what):
                yield

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        with self.create(name) as out:
            out.write(data)
        assert out.stored is not None
        return out.stored

    @contextmanager
    def create(self, name: str) -> Iterator[_Writer]:
        with self._call(f"begin object {name}"):
            write, out = self._memory.begin(name), _Writer()
        try:
            yield out
            with self._call(f"write object {name}"):
                if name in self._memory.objects:
                    raise ObjectExists(f"object {name} exists already")
                if self._memory.begun.pop(write.token, None) is None:
                    raise Unreachable(f"cannot write object {name}: it was discarded")
                data = bytes(out.data)
                self._memory.objects[name] = data, self._memory.now()
                out.stored = StoredObject(name, len(data), checksum_of(data))
        except Killed:
            raise
        except BaseException:
            self._memory.begun.pop(write.token, None)
            raise
        out.closed = True

    def _bytes(self, name: str) -> bytes:
        with self._call(f"read object {name}"):
            if name not in self._memory.objects:
                raise CorruptObject(f"object {name} is missing")
            return self._memory.objects[name][0]

    def read(self, stored: StoredObject) -> pa.Buffer:
        data = self._bytes(stored.name)
        if checksum_of(data) != stored.checksum:
            raise CorruptObject(f"object {stored.name} was altered")
        return pa.py_buffer(data)

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        return pa.py_buffer(self._bytes(name)[offset : offset + length])

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """In two pages, so that much may happen in between."""
        with self._call(f"list {prefix}"):
            names = sorted(self._memory.objects)
        middle = names[len(names) // 2] if names else ""
        for first in (True, False):
            if not first:
                with self._call(f"list {prefix} on"):
                    names = sorted(self._memory.objects)
            for name in [n for n in names if n.startswith(prefix) and (n < middle) is first]:
                if name in self._memory.objects:
                    yield name, len(self._memory.objects[name][0])

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        with self._call("ask for times"):
            return {n: self._memory.objects[n][1] for n in names if n in self._memory.objects}

    def delete(self, names: Iterable[str]) -> None:
        for i, name in enumerate(sorted(names)):
            with self._call(f"delete object {name}") if i % 3 == 0 else _at_once():
                if name in self._memory.objects:
                    assert self._memory.may_delete(name), f"{name} must not be deleted"
                    del self._memory.objects[name]

    def list_unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        with self._call("list unfinished writes"):
            found = [w for w in self._memory.begun.values() if (w.name or "").startswith(prefix)]
        yield from found

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        with self._call("discard unfinished writes"):
            for write in unfinished:
                self._memory.begun.pop(write.token, None)

    def check(self, *, writable: bool) -> None:
        pass

    def remarks(self) -> Sequence[Remark]:
        return ()


@contextmanager
def _at_once() -> Iterator[None]:
    yield
