"""Objects in Cassandra (one of the two-level key-value stores that US 9471438 names).

    cassandra://[user@]host1,host2[:port]/keyspace?consistency=QUORUM&datacenter=dc1&tls=true&prefix=siltstone

The password is in the variable `SILTSTONE_CASSANDRA_PASSWORD`, or in the one that the option `password_variable` names.
The keyspace has to exist, since its replication is its owner's decision; its tables are made by the first write.

    siltstone_objects   partition (entry, shard): key -> value or header, and a row of each chunked write in progress
    siltstone_chunks    partition (entry, key, write id, part): number -> chunk; a part has 64 chunks

An entry's rows lie in `SHARDS` partitions, by a hash of the key, because lightweight transactions on one partition wait
for each other. So a partition holds an eighth of a checkpoint's rows, or at most 64 chunks, and none grows with time.

Each write of an object's row is a lightweight transaction: `IF NOT EXISTS` lets one of several writers win. One without
an answer may have taken place, or may still. So its error is transient, and the next attempt, itself a transaction on
the same row, sees what became of it. Rows are listed by serial reads, which complete what a lost transaction began, so
a listing shows each epoch mark whose writer goes on.

A chunked write has a row beside its object's, in the same partition and thus in the same transactions. Committing
stores the header and ends that row, if it is not dropped. Discarding drops it first, and then deletes chunks. Deleting
an object turns its header into such a row. So wherever a process dies, chunks have either a header or a row that
`list_unfinished` lists. Chunks are plain writes; their logical timestamps let a deletion win over chunks that arrive
late.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import Any

import xxhash

from siltstone.errors import Unreachable, UsageError
from siltstone.store.base import Remark, Unfinished
from siltstone.store.keyvalue import cassandra_statements as cql
from siltstone.store.keyvalue.cassandra_client import (
    CassandraClient,
    CassandraOptions,
    NoTables,
    Servers,
    client,
    translate_errors,
)
from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import (
    CHUNK,
    HEADER_BYTES,
    WRITE_ID_BYTES,
    WRITE_ID_OFFSET,
    Chunks,
    Get,
    Keys,
    Values,
    chunk_stem,
    join_name,
    like_header,
    split_name,
)
from siltstone.store.paths import is_object_name
from siltstone.store.retry import Retrying
from siltstone.store.url import options_of, redact_url

SHARDS = 8
PART_CHUNKS = 64
_SCANS = 16
"""parts of a scan of all partitions: each meets fewer tombstones than Cassandra allows (100,000)"""
_PUT_BYTES = 16 << 20
"""the most that one `put` of chunks brings (`chunked`)"""


def open_cassandra(url: str) -> Retrying:
    """Open the store at a `cassandra://` URL, without I/O.

    Raises:
        UsageError: the URL or an option is not valid.
    """
    options = options_of(url, CassandraOptions)
    return Retrying(ChunkedStore(CassandraKeyValue(url, options), options.policy, options.checksums), options.policy)


class CassandraKeyValue:
    """`KeyValue` over one keyspace; it holds only plain values, so it can be sent to other processes."""

    def __init__(self, url: str, options: CassandraOptions) -> None:
        Servers.of(url, options)  # refuses a URL that is not valid
        self.url, self.label = url, redact_url(url)
        self.value_limit_bytes = options.chunk_bytes
        self._options = options

    @property
    def client(self) -> CassandraClient:
        """This process's client."""
        return client(self.url, self._options)

    def place_of(self, entry: str, key: bytes) -> tuple[str, int]:
        """Return the partition of an object's row: entry, with the store's prefix, and shard."""
        return self.partition_name(entry), xxhash.xxh32_intdigest(key) % SHARDS

    def partition_name(self, entry: str) -> str:
        """Return an entry's name in partition keys."""
        return f"{self._options.prefix}:{entry}"

    def entries(self, prefix: str) -> Iterable[str]:
        """Return entries whose names start with `prefix`; goes over all partitions of the keyspace's objects."""
        with translate_errors("list entries", self.label):
            return {entry for entry, _, _ in self._partitions() if entry.startswith(prefix)}

    def sizes(self, entry: str) -> Iterable[tuple[bytes, int]]:
        """Return (key, bytes of its value) of each key except chunks'; rows that no writer here made are ignored."""
        shards = [(self.partition_name(entry), shard) for shard in range(SHARDS)]
        with translate_errors(f"list entry {entry}", self.label):
            rows = chain.from_iterable(self.read_all(cql.SIZES, shards, serial=True))
            return [(row.key, row.size) for row in rows if row.size is not None and _is_key(entry, row.key)]

    @contextmanager
    def open_entry(self, entry: str, key: bytes = b"") -> Iterator[Get]:
        """Open an entry for reading values (`KeyValue.open_entry`)."""
        yield _CassandraReading(self, entry, f"read object {join_name(entry, key)}" if key else f"read entry {entry}")

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        """Store a new key by one lightweight transaction; False if it is taken."""
        with translate_errors(f"write object {join_name(entry, key)}", self.label):
            place = self.place_of(entry, key)
            return self.ensure_tables().run(cql.ADD, *place, key, len(value), bytes(value)).was_applied

    def stage(self, entry: str, key: bytes, write_id: bytes) -> "_StagedInCassandra | None":
        """Begin a chunked write of `key`; None if it is taken."""
        with translate_errors(f"write object {join_name(entry, key)}", self.label):
            place = self.place_of(entry, key)
            if self.ensure_tables().run(cql.VALUE, *place, key).one() is not None:
                return None
            # Not applied means that an attempt whose answer was lost began it: the id is new for each write.
            self.client.run(cql.BEGIN, *place, chunk_stem(key, write_id), datetime.now(UTC), False)
        return _StagedInCassandra(self, entry, key, write_id)

    def delete(self, entry: str, keys: list[bytes]) -> None:
        """Delete keys; a header becomes the row of a dropped write in one transaction, and its chunks go after it."""
        with translate_errors(f"delete from entry {entry}", self.label):
            rows = [(*self.place_of(entry, key), key) for key in keys]
            found = self.read_all(cql.VALUE, rows)
            there = [(row, answer[0].value) for row, answer in zip(rows, found, strict=True) if answer]
            for row, value in there:
                if value is not None and like_header(value):
                    self._delete_chunked(entry, row, _write_id(value))
            plain = [row for row, value in there if value is None or not like_header(value)]
            if plain:
                self.client.run_all(cql.DELETE, plain)

    def _delete_chunked(self, entry: str, row: tuple[str, int, bytes], write_id: bytes) -> None:
        *place, key = row
        stem = chunk_stem(key, write_id)
        began = (cql.BEGIN, (*place, stem, datetime.now(UTC), True))
        if not self.client.run_batch((cql.DELETE, row), began):
            self.client.run(cql.DELETE, *row)  # gone already, or a row of its write was planted
        self.drop(entry, key, write_id)

    def list_unfinished(self) -> Iterable[Unfinished]:
        """List chunked writes not committed, with their names; rows that no writer here made are ignored."""
        with translate_errors("list unfinished writes", self.label):
            # Their keys sort before all others, so each partition with such a row begins with one.
            places = [(entry, shard) for entry, shard, key in self._partitions() if key.startswith(CHUNK)]
            rows = [(self.partition_name(entry), shard) for entry, shard in places]
            answers = self.read_all(cql.STAGED, rows, serial=True)
        found = ((entry, row) for (entry, _), answer in zip(places, answers, strict=True) for row in answer)
        writes = [_decode_unfinished(entry, row.key, row.began) for entry, row in found]
        return [write for write in writes if write is not None]

    def discard(self, unfinished: Unfinished) -> None:
        """Free the space of an unfinished write."""
        if unfinished.name is None:
            raise UsageError(f"unfinished write {unfinished.token} is not of {self.label}: its name is not known")
        entry, key = split_name(unfinished.name)
        with translate_errors(f"discard a write of {unfinished.name}", self.label):
            self.drop(entry, key, bytes.fromhex(unfinished.token))

    def drop(self, entry: str, key: bytes, write_id: bytes) -> None:
        """Drop a write that was not committed, so that it cannot be any more, and delete its chunks; no error if gone.

        A row that names the write of a live object was planted; only the row is deleted.
        """
        place = self.place_of(entry, key)
        head, stem = (*place, key), chunk_stem(key, write_id)
        [found] = self.read_all(cql.VALUE, [head], serial=True)
        live = bool(found) and _write_id(found[0].value or b"") == write_id
        row = (*place, stem)
        if not live:
            if not self._run_if_tables(cql.DROP, row):
                return
            self._delete_chunks(self.partition_name(entry), key, write_id)
        self._run_if_tables(cql.DELETE, row)

    def _delete_chunks(self, entry: str, key: bytes, write_id: bytes) -> None:
        """Delete all parts of a write, and those that a `put` in progress may still bring."""
        step = _PUT_BYTES // (self.value_limit_bytes * PART_CHUNKS) + 2
        start, more = 0, True
        while more:
            parts = [(entry, key, write_id, part) for part in range(start, start + step)]
            more = any(self.read_all(cql.PART_OF, parts))
            self.client.run_all(cql.DELETE_PART, parts)
            start += step

    def check(self, *, writable: bool) -> None:
        """Check that the servers answer and that the keyspace exists; if `writable`, make its tables.

        Raises:
            UsageError: the keyspace does not exist.
            Unreachable: they do not answer, or refuse the credentials.
        """
        with translate_errors("use the store", self.label):
            self.read_all(cql.VALUE, [(*self.place_of("", b"check"), b"check")])
            if writable:
                self.ensure_tables()

    def remarks(self) -> Sequence[Remark]:
        """Report how often the keyspace is stored, and whether its writes survive a lost machine or a power failure."""
        with translate_errors("ask for the settings", self.label):
            keyspace = self.client.keyspace
            synced = self.client.setting("commitlog_sync")
        strategy = getattr(keyspace, "replication_strategy", None)
        if keyspace is None or strategy is None:
            return []
        found = [Remark(f"keyspace {keyspace.name} is replicated by {strategy.export_for_schema()}")]
        if not keyspace.durable_writes:
            advice = f"ALTER KEYSPACE {keyspace.name} WITH durable_writes = true"
            found.append(Remark("the keyspace writes no commit log: a restart loses state", advice))
        if getattr(strategy, "replication_factor", None) == 1 and synced == "periodic":
            advice = "set its commitlog_sync to batch or group, or replicate the keyspace"
            found.append(Remark("one copy is kept, whose last seconds a power failure loses", advice))
        return found

    def ensure_tables(self) -> CassandraClient:
        """Return the client once there are tables to write to."""
        found = self.client
        found.make_tables()
        return found

    def read_all(self, text: str, rows: Sequence[tuple[Any, ...]], serial: bool = False) -> list[list[Any]]:
        """Read for each of `rows`; nothing where no table is, since nothing was written yet."""
        try:
            return self.client.run_all(text, rows, serial)
        except NoTables:
            return [[] for _ in rows]

    def _run_if_tables(self, text: str, row: tuple[Any, ...]) -> bool:
        try:
            return self.client.run(text, *row).was_applied
        except NoTables:
            return False

    def _partitions(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield (entry, shard, first key) of the store's partitions."""
        bounds = [-(1 << 63) + (index << 64) // _SCANS for index in range(_SCANS)] + [(1 << 63) - 1]
        start = self.partition_name("")
        for row in chain.from_iterable(self.read_all(cql.PARTITIONS, list(pairwise(bounds)))):
            entry = row.entry.removeprefix(start)
            if row.entry.startswith(start) and (entry == "" or is_object_name(entry)):
                yield entry, row.shard, row.key


def _write_id(value: bytes) -> bytes:
    """Return the write id of a header; empty if `value` is not one."""
    return value[WRITE_ID_OFFSET : WRITE_ID_OFFSET + WRITE_ID_BYTES] if like_header(value) else b""


def _is_key(entry: str, key: bytes) -> bool:
    return key.isascii() and is_object_name(join_name(entry, key))


def _decode_unfinished(entry: str, stem: bytes, began: datetime | None) -> Unfinished | None:
    """Decode a row of the writes in progress; None if it is not valid."""
    key, write_id = stem[1 : -WRITE_ID_BYTES - 1], stem[-WRITE_ID_BYTES:]
    if began is None or stem != chunk_stem(key, write_id) or not key or not _is_key(entry, key):
        return None
    return Unfinished(write_id.hex(), join_name(entry, key), began.replace(tzinfo=UTC))


class _CassandraReading:
    """`Get` of one entry. A row comes whole: the server's limit on a write (16 MiB) is the limit of a planted one."""

    def __init__(self, driver: CassandraKeyValue, entry: str, what: str) -> None:
        self._driver, self._entry, self._what = driver, entry, what

    def __call__(self, keys: Keys, most: int) -> Values:
        """Return the keys' values, or the lengths of those longer than `most` bytes."""
        found = dict.fromkeys(keys)
        with translate_errors(self._what, self._driver.label):
            heads = [key for key in keys if not key.startswith(CHUNK)]
            chunks = [key for key in keys if key.startswith(CHUNK)]
            found |= self._read(cql.VALUE, heads, lambda key: (*self._driver.place_of(self._entry, key), key), most)
            found |= self._read(cql.CHUNK_OF, chunks, self._chunk, most)
        return [found[key] for key in keys]

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        """Return the length of a key's value, and its bytes in [start, stop)."""
        [value] = self([key], _PUT_BYTES)
        return (len(value), value[start:stop]) if isinstance(value, bytes) else None

    def _chunk(self, key: bytes) -> tuple[str, bytes, bytes, int, int]:
        number, stem = int.from_bytes(key[-4:], "big"), key[:-4]
        name, write_id = stem[1 : -WRITE_ID_BYTES - 1], stem[-WRITE_ID_BYTES:]
        return self._driver.partition_name(self._entry), name, write_id, number // PART_CHUNKS, number

    def _read(self, text: str, keys: Keys, row: Callable[[bytes], tuple[Any, ...]], most: int) -> dict[bytes, Any]:
        answers = self._driver.read_all(text, [row(key) for key in keys])
        values = {key: answer[0].value for key, answer in zip(keys, answers, strict=True) if answer}
        return {key: value if len(value) <= most else len(value) for key, value in values.items() if value is not None}


class _StagedInCassandra:
    """`StagedWrite`: chunks in partitions of their own, which only the write's header leads to."""

    def __init__(self, driver: CassandraKeyValue, entry: str, key: bytes, write_id: bytes) -> None:
        self._driver, self._entry, self._key, self._write_id = driver, entry, key, write_id
        self._row = (*driver.place_of(entry, key), chunk_stem(key, write_id))
        self._what = f"write object {join_name(entry, key)}"

    def put(self, chunks: Chunks) -> None:
        """Store the next chunks; those of a write that was dropped meanwhile were deleted before they came."""
        entry = self._driver.partition_name(self._entry)
        numbered = ((int.from_bytes(key[-4:], "big"), chunk) for key, chunk in chunks)
        rows = [
            (entry, self._key, self._write_id, number // PART_CHUNKS, number, bytes(chunk))
            for number, chunk in numbered
        ]
        with translate_errors(self._what, self._driver.label):
            self._driver.client.run_all(cql.PUT_CHUNK, rows)
            found = self._driver.client.run(cql.DROPPED, *self._row).one()
        if found is None or found.dropped:
            raise self._discarded_error()

    def commit(self, header: bytes) -> bool:
        """Make header and chunks visible; False if the key is taken."""
        *place, _ = self._row
        head = (*place, self._key)
        with translate_errors(self._what, self._driver.label):
            add = (cql.ADD, (*head, HEADER_BYTES, header))
            if self._driver.client.run_batch(add, (cql.END, self._row)):
                return True
            found = self._driver.client.run(cql.VALUE, *head, serial=True).one()
        if found is None:
            raise self._discarded_error()
        return found.value == header  # an attempt whose answer was lost committed it

    def discard(self) -> None:
        """Drop what was staged."""
        with translate_errors(self._what, self._driver.label):
            self._driver.drop(self._entry, self._key, self._write_id)

    def _discarded_error(self) -> Unreachable:
        return Unreachable(f"cannot {self._what}: its write in {self._driver.label} was discarded; start it again")
