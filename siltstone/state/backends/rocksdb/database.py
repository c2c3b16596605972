"""One RocksDB database in a directory: many keys per call, errors translated.

It has two column families, with files of their own and one log: rows (keys that begin with `ROWS`) lie in the default
one, everything else in `LOCAL`. So files with rows hold nothing else (docs/adr/0058).

Tables are read through the page cache (mmap), as the heap's files are: the kernel takes the pages back when memory is
scarce, so that a process needs no more memory of its own for a larger state.
"""

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Checkpoint,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
    WriteBatch,
)

from siltstone.errors import StateError, Unreachable

DATABASE = "rocksdb"
"""the directory of the database, in that of the state"""
CURRENT, MANIFEST, TABLE_FILE = "CURRENT", "MANIFEST-", ".sst"
"""names of RocksDB's files: the first names the second, which names the table files"""
ROWS = b"t"
"""what the keys of rows begin with"""
LOCAL = "local"
"""the column family of all other keys"""
DISTRUST = "delete this working state and restore it"
_WRITE_BUFFER_BYTES = 4 << 20
"""small, because a buffer that fits the processor's cache is filled in half the time; two may exist at once"""
_FILE_BYTES = 8 << 20
"""of a table file: while one is written, its filter and its index are in memory"""
_BASE_LEVEL_BYTES = 64 << 20
_OPEN_FILES = 128
"""table files whose filters and indexes are in memory; further ones are opened when they are read"""
_BLOOM_BITS = 10
_COMPACTED_FILES = 8
"""files of newest changes, one per step or write buffer, that are compacted together"""
_POLL_S = 0.001
FULL = ("no space left", "quota exceeded", "file too large", "read-only file system", "too many open files")

Pair = tuple[bytes, bytes]


class AtomicWrite:
    """Puts and deletes that become visible at once, completely or not at all, whatever is killed.

    All keys of one call are rows, or none is. `Database.changes` makes them.
    """

    def __init__(self, local: Any) -> None:
        self.batch = WriteBatch(raw_mode=True)
        self._local = local

    def put(self, keys: Sequence[bytes], values: Iterable[bytes]) -> None:
        """Put many keys."""
        if keys:
            deque(map(self.batch.put, keys, values, repeat(self._family(keys[0]))), maxlen=0)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete many keys."""
        if keys:
            deque(map(self.batch.delete, keys, repeat(self._family(keys[0]))), maxlen=0)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete all keys from `start` on and before `end`."""
        self.batch.delete_range(start, end, self._family(start))

    def _family(self, key: bytes) -> Any:
        return None if key.startswith(ROWS) else self._local


class Database:
    """The database in `directory`, made if it is missing. The caller has exclusive use of the directory.

    A write that has returned survives if the process is killed. A restart of the machine may lose the newest writes,
    but never one before a write that is left: RocksDB reads its log up to where it is torn.
    """

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        """Open it; several processes at once can, if all of them only read.

        Raises:
            StateError: it is damaged, or another process has it open.
            Unreachable: the disk is full or does not answer.
        """
        self.directory, self._read_only = directory, read_only
        options = _options()
        access = AccessType.read_only(False) if self._read_only else AccessType.read_write()
        self._local: Any = None
        with self._translate_errors("open"):
            # Without the column families, those of a database that exists would keep the options of its first opening.
            self._rocksdb: Any = Rdict(str(directory), options, {"default": options, LOCAL: options}, access)
            self._local = self._rocksdb.get_column_family(LOCAL)
            self._local_handle = self._rocksdb.get_column_family_handle(LOCAL)

    def changes(self) -> AtomicWrite:
        """Return changes of this database, none so far."""
        return AtomicWrite(self._local_handle)

    def _family(self, key: bytes) -> Any:
        return self._rocksdb if key.startswith(ROWS) else self._local

    def get(self, key: bytes) -> bytes | None:
        """Return the value of one key."""
        with self._translate_errors("read"):
            return self._family(key).get(key)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of many keys, all of them rows, or none; they are found faster if they are sorted.

        RocksDB takes about a kilobyte for each until all are found.
        """
        with self._translate_errors("read"):
            return self._family(keys[0]).get(keys) if keys else []

    def write(self, changes: AtomicWrite) -> None:
        """Write changes at once."""
        with self._translate_errors("write"):
            self._rocksdb.write(changes.batch)

    def keys(self, start: bytes, end: bytes) -> list[bytes]:
        """Return the keys from `start` on and before `end`, sorted; all of them rows, or none."""
        with self._translate_errors("read"):
            return list(self._family(start).keys(from_key=start, read_opt=_read_until(end)))

    def is_empty(self) -> bool:
        """Whether it has no key at all."""
        with self._translate_errors("read"):
            return all(next(iter(family.keys()), None) is None for family in (self._rocksdb, self._local))

    def items(self, start: bytes, end: bytes, sizes: Iterable[int] = repeat(1 << 17)) -> Iterator[list[Pair]]:
        """Yield keys and values from `start` on and before `end`, sorted, in lists of at most `sizes` pairs."""
        with self._translate_errors("read"):
            found = self._family(start).items(from_key=start, read_opt=_read_until(end))
        for size in sizes:
            with self._translate_errors("read"):
                part = list(islice(found, size))
            if not part:
                return
            yield part

    @contextmanager
    def load_sorted(self) -> Iterator[Callable[[Sequence[bytes], Sequence[bytes]], None]]:
        """Yield a function that takes rows with keys in order, after all before; the block's end adds all at once.

        They are written into table files without the detour through write buffers and compaction.
        """
        with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
            files, room, writer = list[str](), 0, None

            def put(keys: Sequence[bytes], values: Sequence[bytes]) -> None:
                nonlocal room, writer
                with self._translate_errors("write"):
                    for key, value in zip(keys, values, strict=True):
                        if writer is None:
                            writer, room = SstFileWriter(_options()), _FILE_BYTES
                            files.append(f"{scratch}/{len(files)}")
                            writer.open(files[-1])
                        writer[key] = value
                        room -= len(key) + len(value)
                        if room < 0:
                            writer.finish()
                            writer = None

            yield put
            with self._translate_errors("write"):
                if writer is not None:
                    writer.finish()
                if files:
                    options = IngestExternalFileOptions()
                    options.set_move_files(True)
                    self._rocksdb.ingest_external_file(files, options)

    def copy_to(self, directory: Path) -> None:
        """Make a database with the present content in a new directory; it shares the table files by hard links."""
        with self._translate_errors("copy"):
            Checkpoint(self._rocksdb).create_checkpoint(str(directory))

    def copy_rows(self, directory: Path) -> None:
        """Make a database with the present rows and nothing else in a new directory, by hard links.

        It has table files, which never change, a `MANIFEST-<n>` and `CURRENT`.
        """
        self.copy_to(directory)
        with self._translate_errors("copy"):
            options = _options()
            options.set_disable_auto_compactions(True)
            copy: Any = Rdict(str(directory), options, {"default": options, LOCAL: options}, AccessType.read_write())
            try:
                copy.drop_column_family(LOCAL)
            finally:
                copy.close()
            for name in os.listdir(directory):
                if not (name == CURRENT or name.startswith(MANIFEST) or name.endswith(TABLE_FILE)):
                    os.unlink(directory / name)

    def close(self) -> None:
        """Close it; idempotent. What was written lies in tables then, so that opening has no log to read.

        It waits for a compaction that runs: RocksDB would drop its work, and begin it anew at the next opening.
        """
        if self._rocksdb is not None:
            rocksdb, self._rocksdb = self._rocksdb, None
            local, self._local, self._local_handle = self._local, None, None
            with self._translate_errors("close"):
                try:
                    if not self._read_only:
                        rocksdb.flush()
                        local.flush()
                        while rocksdb.property_int_value("rocksdb.num-running-compactions"):
                            time.sleep(_POLL_S)
                finally:
                    if local is not None:
                        local.close()
                    rocksdb.close()

    @contextmanager
    def translate_damage(self) -> Iterator[None]:
        """Translate a `ValueError` of what decodes keys and values in a `with` block: the database is damaged."""
        try:
            yield
        except ValueError as error:
            raise StateError(f"cannot read {self.directory}: {error}", advice=DISTRUST) from error

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # rocksdict raises plain exceptions with RocksDB's text; another type is a mistake of ours, or the system's.
            if type(error) is not Exception and not isinstance(error, OSError):
                raise
            said = str(error).split("\n", 1)[0]
            if any(words in said.lower() for words in FULL):
                raise Unreachable(f"cannot {what} {self.directory}: {said}; free some space") from error
            raise StateError(f"cannot {what} {self.directory}: {said}", advice=DISTRUST) from error


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_target_file_size_base(_FILE_BYTES)
    options.set_max_bytes_for_level_base(_BASE_LEVEL_BYTES)
    options.set_level_zero_file_num_compaction_trigger(_COMPACTED_FILES)
    options.set_max_open_files(_OPEN_FILES)
    options.set_allow_mmap_reads(True)
    options.set_max_background_jobs(max(2, min(4, os.cpu_count() or 1)))
    options.set_max_file_opening_threads(1)  # each would need a stack
    options.set_paranoid_checks(True)
    options.set_keep_log_file_num(1)
    options.set_skip_stats_update_on_db_open(True)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    tables = BlockBasedOptions()
    tables.set_bloom_filter(_BLOOM_BITS, False)
    tables.set_format_version(5)
    tables.disable_cache()  # the page cache is one
    options.set_block_based_table_factory(tables)
    return options


def _read_until(end: bytes) -> ReadOptions:
    bounds = ReadOptions()
    bounds.set_iterate_upper_bound(end)
    return bounds
