"""Objects in embedded RocksDB (the LevelDB of US 9471438): one database an entry, opened for each call.

    rocksdb:///absolute/path?chunk_bytes=4194304&lock_wait_s=60

    PATH/<entry>/.db/         the database of an entry: key -> value or header, and the chunks (`key_value`);
                              \\1 key -> the size of its value, since RocksDB tells no size without reading
    PATH/.tmp/<write id>/     a chunked write at work: table files, and the name of its object

A RocksDB has one process that writes; here many do, one after another: who writes locks the entry's directory, who
reads shares the lock, and both are out again within milliseconds. A chunked value is written once, as a table file of
its own outside the lock, and its database then takes in the file as it is (hard-linked, whole or not at all).
"""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field
from rocksdict import (
    AccessType,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
    WriteBatch,
    WriteOptions,
)

from siltstone.errors import CorruptObject, SiltstoneError, Unreachable, UsageError
from siltstone.store.base import Unfinished
from siltstone.store.chunked import ChunkedStore
from siltstone.store.filesystem import FilesystemStore, make_durable
from siltstone.store.filesystem import reaching as reaching_files
from siltstone.store.key_value import CHUNK, SMALLEST_LIMIT_BYTES, Get, Header, chunk_key
from siltstone.store.paths import TEMPORARY, check_object_name
from siltstone.store.retry import Retrying, RetryPolicy
from siltstone.store.url import options_of, shown, split

DATABASE = ".db"
_SIZE = b"\1"
_NAME = "name"
_CHUNKS, _HEAD = "chunks.sst", "head.sst"


class RocksDBOptions(BaseModel):
    """Options of a `rocksdb://` URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_bytes: int = Field(
        4 << 20, ge=SMALLEST_LIMIT_BYTES, le=1 << 30, description="bytes of the largest value stored whole"
    )
    lock_wait_s: float = Field(60.0, ge=0, description="seconds to wait for other processes in the same entry")

    @property
    def policy(self) -> RetryPolicy:
        """Many short waits: a lock is held for milliseconds, or as long as a large value is read."""
        return RetryPolicy(attempts=1_000_000, wait_s=0.002, wait_max_s=0.05, total_s=self.lock_wait_s)


def open_rocksdb(url: str) -> Retrying:
    """The store that a `rocksdb://` URL names; does no I/O.

    Raises:
        UsageError: no such URL, or an option that makes no sense.
    """
    options = options_of(url, RocksDBOptions)
    parts = split(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.fragment or len(path) < 2 or "\0" in path:
        raise UsageError(f"{shown(url)} is no RocksDB URL: write rocksdb:///absolute/path")
    driver = RocksDBKeyValue(url, Path(os.path.abspath(path)), options.chunk_bytes)
    return Retrying(ChunkedStore(driver, options.policy), options.policy)


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn what RocksDB or the system says into this project's errors: `what` could not be done, and what to check."""
    try:
        yield
    except OSError:
        with reaching_files(what):
            raise
    except Exception as error:
        # rocksdict raises plain exceptions with RocksDB's own words; any other type is a mistake in here.
        if isinstance(error, SiltstoneError) or type(error) is not Exception:
            raise
        raise _named(str(error).split("\n", 1)[0], what) from error


def _named(said: str, what: str) -> SiltstoneError:
    lower = said.lower()
    if "/lock:" in lower or "lock hold by" in lower:
        return Unreachable(f"cannot {what}: another process has the database open; wait for it", transient=True)
    if "corruption" in lower or "checksum mismatch" in lower:
        return CorruptObject(f"cannot {what}: its RocksDB was altered or cut: {said}")
    hints = {
        "no space left": "free some space",
        "quota exceeded": "free some space, or raise the quota",
        "file too large": "raise the limit on file size",
        "read-only file system": "mount the file system for writing, or name another path",
        "permission denied": "check the owner and permissions",
        "too many open files": "raise the limit on open files",
    }
    hint = next((hint for words, hint in hints.items() if words in lower), "check that the disk is there and healthy")
    return Unreachable(f"cannot {what}: {said}; {hint}")


def database_options() -> Options:
    """How every database here is made and opened."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())  # what is stored is compressed already
    options.set_enable_blob_files(True)  # a compaction moves keys, not values
    options.set_min_blob_size(4096)
    options.set_enable_blob_gc(True)
    options.set_write_buffer_size(4 << 20)
    options.set_paranoid_checks(True)
    options.set_keep_log_file_num(1)
    options.set_skip_stats_update_on_db_open(True)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


class RocksDBKeyValue:
    """`KeyValue` over the databases under `root`; plain values only, so it can be sent to other processes."""

    def __init__(self, url: str, root: Path, value_limit_bytes: int) -> None:
        self.url, self.label = url, shown(url)
        self.root = root
        self.value_limit_bytes = value_limit_bytes
        self._files = FilesystemStore(root)

    def entries(self, prefix: str) -> Iterable[str]:
        """As `KeyValue.entries`: a walk over directories, those left out whose entries cannot match."""
        waiting = [""]
        with reaching(f"list {self.label}"):
            while waiting:
                folder = waiting.pop()
                with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / folder) as found:
                    for each in found:
                        name = f"{folder}/{each.name}".lstrip("/")
                        if each.name == DATABASE:
                            yield folder
                        elif not each.name.startswith(".") and (name.startswith(prefix) or prefix.startswith(name)):
                            waiting.append(name)

    def sizes(self, entry: str) -> Iterable[tuple[bytes, int]]:
        """As `KeyValue.sizes`, without reading a value."""
        with self._read(entry) as database, reaching(f"list {self._what(entry)}"):
            if database is None:
                return
            for key, size in database.items(from_key=_SIZE):
                if not key.startswith(_SIZE):
                    break
                yield key[1:], int.from_bytes(size, "big")

    @contextmanager
    def reading(self, entry: str) -> Iterator[Get]:
        """As `KeyValue.reading`: the database stays open, for reading only, as long as the block lasts."""
        with self._read(entry) as database:
            if database is None and not self.root.is_dir():
                raise Unreachable(f"cannot read {self._what(entry)}: its store is not there; mount or restore it")

            def get(keys: list[bytes]) -> list[bytes | None]:
                with reaching(f"read {self._what(entry)}"):
                    values = database.get(keys) if database is not None else [None] * len(keys)
                return values  # type: ignore[return-value]

            yield get

    def add(self, entry: str, key: bytes, value: memoryview) -> bool:
        """As `KeyValue.add`: one synced batch."""
        with self._write(entry) as database, reaching(f"write {self._what(entry)}"):
            if database.get(key) is not None:
                return False
            batch = WriteBatch(raw_mode=True)
            batch.put(key, bytes(value))
            batch.put(_SIZE + key, len(value).to_bytes(8, "big"))
            database.write(batch, _synced())
        return True

    def stage(self, entry: str, key: bytes, write_id: bytes) -> "_StagedInFiles":
        """As `KeyValue.stage`; whether the key is taken is seen at the end."""
        return _StagedInFiles(self, entry, key, write_id)

    def delete(self, entry: str, keys: list[bytes]) -> None:
        """As `KeyValue.delete`: one synced batch; the database of an entry left empty is moved away, then removed."""
        folder = self.root / entry
        gone = self.root / TEMPORARY / uuid.uuid4().hex
        with reaching(f"delete from {self._what(entry)}"):
            if not (folder / DATABASE).is_dir():
                return
            with self._locked(folder, fcntl.LOCK_EX) as there:
                if not there or not (folder / DATABASE / "CURRENT").exists():
                    return
                if self._delete(folder / DATABASE, keys):
                    gone.parent.mkdir(exist_ok=True)
                    (folder / DATABASE).rename(gone)  # at once: a database half removed is a broken one
                    make_durable(folder)
            shutil.rmtree(gone, ignore_errors=True)
            self._remove_empty(folder)

    def unfinished(self) -> Iterable[Unfinished]:
        """As `KeyValue.unfinished`; of unknown name are databases half removed."""
        with reaching(f"list {self.label}"), suppress(FileNotFoundError):
            for found in sorted(os.scandir(self.root / TEMPORARY), key=lambda each: each.name):
                with suppress(FileNotFoundError):
                    began = datetime.fromtimestamp(found.stat().st_mtime, UTC)
                    name = None
                    with suppress(FileNotFoundError):
                        name = Path(found.path, _NAME).read_text() or None
                    yield Unfinished(found.name, name, began)

    def discard(self, unfinished: Unfinished) -> None:
        """As `KeyValue.discard`: a writer whose files are gone cannot hand them over."""
        with reaching(f"discard a write in {self.label}"), suppress(FileNotFoundError):
            shutil.rmtree(self.root / TEMPORARY / check_object_name(unfinished.token))

    def check(self, *, writable: bool) -> None:
        """As `Store.check`: a directory that is not there yet is made by the first write."""
        self._files.check(writable=writable)

    def ingest(self, entry: str, key: bytes, files: list[Path]) -> bool:
        """Take finished table files into an entry's database, durable on return; False if `key` is taken."""
        with self._write(entry) as database, reaching(f"write {self._what(entry)}"):
            if database.get(key) is not None:
                return False
            how = IngestExternalFileOptions()
            how.set_move_files(True)
            database.ingest_external_file([str(path) for path in files], how)
        return True

    def _what(self, entry: str) -> str:
        return f"entry {entry!r} of {self.label}"

    def _delete(self, path: Path, keys: list[bytes]) -> bool:
        """Remove keys and their chunks from the database at `path`; whether it is empty now."""
        database = Rdict(str(path), database_options())
        try:
            batch = WriteBatch(raw_mode=True)
            for key, value in zip(keys, database.get(keys), strict=True):  # type: ignore[arg-type]
                if value is None:
                    continue
                with suppress(CorruptObject):  # chunks of a header that cannot be read go with the database
                    header = Header.decode(value, "")
                    if header is not None:
                        first = chunk_key(key, header.write_id, 0)
                        batch.delete_range(first, chunk_key(key, header.write_id, header.last_chunk) + CHUNK)
                batch.delete(key)
                batch.delete(_SIZE + key)
            if len(batch):
                database.write(batch, _synced())
            left = database.iter()
            left.seek(_SIZE)
            return not left.valid()
        finally:
            database.close()

    @contextmanager
    def _read(self, entry: str) -> Iterator[Rdict | None]:
        """An entry's database for reading, None where there is none; it is not written meanwhile."""
        folder = self.root / entry
        path = folder / DATABASE
        with reaching(f"read {self._what(entry)}"), self._locked(folder, fcntl.LOCK_SH) as there:
            if not there or not (path / "CURRENT").exists():  # to open one that is not there would make its directory
                yield None
                return
            database = Rdict(str(path), database_options(), access_type=AccessType.read_only(False))
            try:
                yield database
            finally:
                database.close()

    @contextmanager
    def _write(self, entry: str) -> Iterator[Rdict]:
        """An entry's database for writing, made where there is none, by nobody else meanwhile."""
        folder = self.root / entry
        with reaching(f"write {self._what(entry)}"):
            while True:
                with suppress(FileNotFoundError):  # a delete removed a directory left empty meanwhile: make it again
                    self._make_directory(folder)
                with self._locked(folder, fcntl.LOCK_EX) as there:
                    if not there:
                        continue
                    database = Rdict(str(folder / DATABASE), database_options())
                    try:
                        yield database
                    finally:
                        database.close()
                    for path in (folder, *folder.parents):  # another process may have made one and not synced it yet
                        make_durable(path)
                        if path == self.root:
                            return

    @contextmanager
    def _locked(self, folder: Path, mode: int) -> Iterator[bool]:
        """Hold a directory's lock; False if there is no such directory.

        Raises:
            Unreachable: another one holds it; transient.
        """
        while True:
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                yield False
                return
            try:
                try:
                    fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise Unreachable(f"{folder} in {self.label} is locked by a writer; wait", transient=True) from None
                if _is_at(descriptor, folder):
                    try:
                        yield True
                    finally:
                        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of a fork may hold the descriptor open
                    return
            finally:
                os.close(descriptor)

    def _make_directory(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            if path == self.root or path in self.root.parents:
                make_durable(path.parent)

    def _remove_empty(self, folder: Path) -> None:
        """Remove `folder` and what is above it as far as they are empty and nobody is about to use them."""
        while folder != self.root:
            try:
                with self._locked(folder, fcntl.LOCK_EX) as there:
                    if there:
                        folder.rmdir()
            except (OSError, Unreachable):
                return
            folder = folder.parent


class _StagedInFiles:
    """`Staged`: chunks in a table file of their own, header and size in a second, so that their key ranges are apart
    from those of other objects and no compaction rewrites them."""

    def __init__(self, driver: RocksDBKeyValue, entry: str, key: bytes, write_id: bytes) -> None:
        self._driver, self._entry, self._key = driver, entry, key
        self._folder = driver.root / TEMPORARY / write_id.hex()
        self._name = f"{entry}/{key.decode()}".lstrip("/")
        self._what = f"write {self._name} in {driver.label}"
        with reaching(self._what):
            self._folder.mkdir(parents=True)
            (self._folder / _NAME).write_text(self._name)
            self._chunks: SstFileWriter | None = self._table(_CHUNKS)

    def put(self, key: bytes, value: memoryview) -> None:
        """As `Staged.put`."""
        assert self._chunks is not None
        with self._reaching():
            self._chunks[key] = bytes(value)

    def commit(self, header: bytes) -> bool:
        """As `Staged.commit`; the files are finished once, however often it is tried to take them in."""
        with self._reaching():
            if self._chunks is not None:
                self._chunks.finish()
                self._chunks = None
                head = self._table(_HEAD)
                head[_SIZE + self._key] = len(header).to_bytes(8, "big")
                head[self._key] = header
                head.finish()
            done = self._driver.ingest(self._entry, self._key, [self._folder / _CHUNKS, self._folder / _HEAD])
        self.discard()
        return done

    def discard(self) -> None:
        """As `Staged.discard`."""
        self._chunks = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _table(self, file: str) -> SstFileWriter:
        table = SstFileWriter(database_options())
        table.open(str(self._folder / file))
        return table

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """As `reaching`; says so where the write was discarded."""
        try:
            with reaching(self._what):
                yield
        except Unreachable as error:
            if error.transient or self._folder.is_dir():
                raise
            raise Unreachable(f"cannot {self._what}: the write was discarded; start it again") from error


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether an open directory is still the one at `folder`."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _synced() -> WriteOptions:
    options = WriteOptions()
    options.sync = True
    return options
