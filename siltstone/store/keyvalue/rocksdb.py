"""Objects in embedded RocksDB (the LevelDB of US 9471438): one database per entry, opened for each call.

    rocksdb:///absolute/path?chunk_bytes=2048&lock_wait_s=60

    PATH/<entry>/.db/         the database of an entry: key -> value or header, and the chunks (`protocol`);
                              \\1 key -> the size of its value, since RocksDB cannot tell sizes without reading
    PATH/.tmp/<write id>/     a chunked write in progress: table files, and the name of its object

A RocksDB database allows one writing process. Here many write, one after another: a writer locks the entry's directory,
readers share the lock, and both hold it only for milliseconds. A chunked value is written once, outside the lock, as
its own table file, which its database then ingests unchanged (hard-linked, completely or not at all).
"""

import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field
from rocksdict import AccessType, IngestExternalFileOptions, SstFileWriter, WriteBatch

from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.store.base import Remark, Unfinished
from siltstone.store.checksums import DEFAULT, Algorithm
from siltstone.store.directories import path_below
from siltstone.store.files import make_durable
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import (
    CHUNK,
    HEADER_BYTES,
    SMALLEST_LIMIT_BYTES,
    Chunks,
    Get,
    Header,
    Keys,
    Values,
    chunk_key,
    join_name,
)
from siltstone.store.keyvalue.rocksdb_database import (
    DATABASE,
    Databases,
    database_options,
    open_database,
    synced_options,
    translate_errors,
)
from siltstone.store.paths import TEMPORARY, check_object_name
from siltstone.store.private import make_private_directory, open_private, private_mode
from siltstone.store.retry import Retrying, RetryPolicy
from siltstone.store.url import options_of, redact_url, split

_SIZE = b"\1"
_NAME = "name"
_NAME_BYTES = 1024
_READ_BYTES = 16 << 10
"""maximum bytes read at once, or one value"""
_CHUNKS, _HEAD = "chunks.sst", "head.sst"


class RocksDBOptions(BaseModel):
    """Options of a `rocksdb://` URL."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    # RocksDB cannot read part of a value: with chunks as small as its blocks, reading part of an object is cheap.
    chunk_bytes: int = Field(
        2048, ge=SMALLEST_LIMIT_BYTES, le=1 << 30, description="bytes of the largest value stored whole"
    )
    checksums: Algorithm = Field(DEFAULT, description="the algorithm of new checksums")
    lock_wait_s: float = Field(60.0, ge=0, description="seconds to wait for other processes in the same entry")

    @property
    def policy(self) -> RetryPolicy:
        """Many short waits: a lock is held for milliseconds, or while a large value is read."""
        return RetryPolicy(attempts=1_000_000, wait_s=0.001, wait_max_s=0.01, total_s=self.lock_wait_s)


def open_rocksdb(url: str) -> Retrying:
    """Open the store at a `rocksdb://` URL, without I/O.

    Raises:
        UsageError: the URL or an option is not valid.
    """
    options = options_of(url, RocksDBOptions)
    parts = split(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.fragment or len(path) < 2 or "\0" in path:
        raise UsageError(f"{redact_url(url)} is not a RocksDB URL: write rocksdb:///absolute/path")
    driver = RocksDBKeyValue(url, Path(os.path.abspath(path)), options.chunk_bytes)
    return Retrying(ChunkedStore(driver, options.policy, options.checksums), options.policy)


class RocksDBKeyValue:
    """`KeyValue` over the databases under `root`; it holds only plain values, so it can be sent to other processes."""

    def __init__(self, url: str, root: Path, value_limit_bytes: int) -> None:
        self.url, self.label = url, f"rocksdb://{root}"
        self.root = root
        self.value_limit_bytes = value_limit_bytes
        self.databases = Databases(root, self.label)

    def entries(self, prefix: str) -> Iterable[str]:
        """Return entries whose names start with `prefix`, by a walk over directories that can match."""
        waiting = [""]
        with translate_errors(f"list {self.label}"):
            while waiting:
                folder = waiting.pop()
                with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / folder) as found:
                    for each in found:
                        if each.is_symlink():
                            continue  # it could lead anywhere
                        name = f"{folder}/{each.name}".lstrip("/")
                        if each.name == DATABASE:
                            yield folder
                        elif not each.name.startswith(".") and (name.startswith(prefix) or prefix.startswith(name)):
                            waiting.append(name)

    def sizes(self, entry: str) -> Iterable[tuple[bytes, int]]:
        """Return (key, bytes of its value) of each key except chunks', without reading values."""
        with (
            self.databases.open_to_read(entry) as database,
            translate_errors(f"list {self.databases.describe(entry)}", self.root),
        ):
            if database is None:
                return
            for key, size in database.items(from_key=_SIZE):
                if not key.startswith(_SIZE):
                    break
                yield key[1:], int.from_bytes(size, "big")

    @contextmanager
    def open_entry(self, entry: str, key: bytes = b"") -> Iterator[Get]:
        """Open an entry's database for reading only, within the block (`KeyValue.open_entry`)."""
        what = self.databases.describe(entry, key)
        with self.databases.open_to_read(entry, key) as database:
            if database is None and not self.root.is_dir():
                raise Unreachable(f"cannot read {what}: its store is missing; mount or restore it")

            yield _RocksDBReading(database, what, self.root)

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        """Store a new key by one synced batch; False if it is taken."""
        with self.databases.open_to_write(entry, key) as database:
            if database.get(key) is not None:
                return False
            batch = WriteBatch(raw_mode=True)
            batch.put(key, bytes(value))
            batch.put(_SIZE + key, len(value).to_bytes(8, "big"))
            database.write(batch, synced_options())
        return True

    def stage(self, entry: str, key: bytes, write_id: bytes) -> "_StagedInFiles":
        """Begin a chunked write of `key`; `commit` finds out whether it is taken."""
        return _StagedInFiles(self, entry, key, write_id)

    def delete(self, entry: str, keys: list[bytes]) -> None:
        """Delete keys and their chunks by one synced batch; an entry left empty is moved away, then removed."""
        with translate_errors(f"delete from {self.databases.describe(entry)}"):
            folder = self.databases.folder(entry)
            gone = path_below(self.root, TEMPORARY, uuid.uuid4().hex)
            if not (folder / DATABASE).is_dir():
                return
            with self.databases.lock(folder, fcntl.LOCK_EX) as there:
                if not there or not (folder / DATABASE / "CURRENT").exists():
                    return
                if self._delete(folder / DATABASE, keys):
                    gone.parent.mkdir(private_mode(of_directory=True), exist_ok=True)
                    (folder / DATABASE).rename(gone)  # atomic: a half-removed database would be broken
                    make_durable(folder)
            shutil.rmtree(gone, ignore_errors=True)
            self.databases.remove_empty(folder)

    def list_unfinished(self) -> Iterable[Unfinished]:
        """List chunked writes not committed; half-removed databases are listed without a name."""
        with translate_errors(f"list {self.label}"), suppress(FileNotFoundError):
            for found in sorted(os.scandir(path_below(self.root, TEMPORARY)), key=lambda each: each.name):
                with suppress(FileNotFoundError):
                    began = datetime.fromtimestamp(found.stat(follow_symlinks=False).st_mtime, UTC)
                    yield Unfinished(found.name, _name_in(Path(found.path)), began)

    def discard(self, unfinished: Unfinished) -> None:
        """Free the space of an unfinished write; its writer cannot commit without its files."""
        with translate_errors(f"discard a write in {self.label}"), suppress(FileNotFoundError):
            shutil.rmtree(path_below(self.root, TEMPORARY, check_object_name(unfinished.token)))

    def check(self, *, writable: bool) -> None:
        """Check that the directory can be used; a missing one is made by the first write.

        Reading needs a writable directory, too: rocksdict writes a file into a database's directory when it opens one.
        """
        FilesystemStore(self.root).check(writable=True)

    def remarks(self) -> Sequence[Remark]:
        """Return none: a database is only files."""
        return ()

    def ingest(self, entry: str, key: bytes, files: list[Path]) -> bool:
        """Ingest finished table files into an entry's database, durable on return; False if `key` is taken."""
        with self.databases.open_to_write(entry, key) as database:
            if database.get(key) is not None:
                return False
            how = IngestExternalFileOptions()
            how.set_move_files(True)
            database.ingest_external_file([str(path) for path in files], how)
        return True

    def _delete(self, path: Path, keys: list[bytes]) -> bool:
        """Delete keys and their chunks from the database at `path`; if it has no others, only return True."""
        deleted = set(keys)
        database: Any = open_database(path, AccessType.read_only(False))
        try:
            if all(key.removeprefix(_SIZE) in deleted for key in database.keys(from_key=_SIZE)):
                return True
        finally:
            database.close()
        database = open_database(path)
        try:
            batch = WriteBatch(raw_mode=True)
            for key, value in zip(keys, _values(database, keys, HEADER_BYTES), strict=True):
                if value is None:
                    continue
                with suppress(CorruptObject):  # chunks of an unreadable header are removed with the database
                    header = Header.decode(value, "") if isinstance(value, bytes) else None
                    if header is not None:
                        first = chunk_key(key, header.write_id, 0)
                        batch.delete_range(first, chunk_key(key, header.write_id, header.last_chunk) + CHUNK)
                batch.delete(key)
                batch.delete(_SIZE + key)
            if len(batch):
                database.write(batch, synced_options())
            return False
        finally:
            database.close()


def _values(database: Any, keys: Keys, most: int) -> Values:
    """Return the keys' values in an open database, or the lengths of those longer than `most` bytes."""
    step, values = max(1, _READ_BYTES // most), Values()
    for start in range(0, len(keys), step):
        found = database.get(keys[start : start + step])
        values += [value if value is None or len(value) <= most else len(value) for value in found]
    return values


def _name_in(folder: Path) -> str | None:
    """Read the object name of the write in `folder`; None if it is missing or not valid.

    A link is not followed, and a pipe is not waited for.
    """
    with suppress(OSError, ValueError, UsageError):  # a UnicodeDecodeError is a ValueError
        descriptor = os.open(folder / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            return check_object_name((file.read(_NAME_BYTES) or b"").decode())
    return None


class _RocksDBReading:
    """`Get` of an open database, or of none.

    RocksDB cannot tell lengths without reading, nor read part of a value. Values that are too long are in memory until
    their length is checked, so few values are read at once.
    """

    def __init__(self, database: Any, what: str, root: Path) -> None:
        self._database, self._what, self._root = database, what, root

    def __call__(self, keys: Keys, most: int) -> Values:
        """Return the keys' values, or the lengths of those longer than `most` bytes."""
        if self._database is None:
            return [None] * len(keys)
        with translate_errors(f"read {self._what}", self._root):
            return _values(self._database, keys, most)

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        """Return the length of a key's value, and its bytes in [start, stop)."""
        if self._database is None:
            return None
        with translate_errors(f"read {self._what}", self._root):
            value = self._database.get(key)
        return None if value is None else (len(value), value[start:stop])


class _StagedInFiles:
    """`StagedWrite`: chunks in one table file, header and size in a second. Their key ranges are thus separate from
    those of other objects, and no compaction rewrites them."""

    def __init__(self, driver: RocksDBKeyValue, entry: str, key: bytes, write_id: bytes) -> None:
        self._driver, self._entry, self._key = driver, entry, key
        self._folder = path_below(driver.root, TEMPORARY, write_id.hex())
        self._name = join_name(entry, key)
        self._what = f"write {driver.databases.describe(entry, key)}"
        with translate_errors(self._what):
            make_private_directory(self._folder, exist_ok=False)
            with open(self._folder / _NAME, "x", opener=open_private) as file:  # "x" follows no link
                file.write(self._name)
            self._chunks: SstFileWriter | None = self._table(_CHUNKS)

    def put(self, chunks: Chunks) -> None:
        """Store the next chunks."""
        assert self._chunks is not None
        with self._translate_errors():
            for key, value in chunks:
                self._chunks[key] = bytes(value)

    def commit(self, header: bytes) -> bool:
        """Make header and chunks visible; False if the key is taken. Retries do not finish the files again."""
        with self._translate_errors():
            if self._chunks is not None:
                self._chunks.finish()
                self._chunks = None
                head = self._table(_HEAD)
                head[_SIZE + self._key] = len(header).to_bytes(8, "big")
                head[self._key] = header
                head.finish()
            files = [self._folder / _CHUNKS, self._folder / _HEAD]
            if any(stat.S_ISLNK(path.lstat().st_mode) for path in files):  # RocksDB would ingest the link itself
                raise Unreachable(f"cannot {self._what}: its files were replaced by links: check who may write there")
            done = self._driver.ingest(self._entry, self._key, files)
        self.discard()
        return done

    def discard(self) -> None:
        """Delete what was staged."""
        self._chunks = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _table(self, file: str) -> SstFileWriter:
        table, path = SstFileWriter(database_options()), self._folder / file
        path.open("xb").close()  # follows no link, unlike RocksDB, which then opens the file made here
        table.open(str(path))
        return table

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors; say so if the write was discarded."""
        try:
            with translate_errors(self._what):
                yield
        except Unreachable as error:
            if error.transient or self._folder.is_dir():
                raise
            raise Unreachable(f"cannot {self._what}: the write was discarded; start it again") from error
