"""RocksDB databases in directories, opened by one process after another: locks, durability, translation of errors."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rocksdict import AccessType, DBCompressionType, Options, Rdict, WriteOptions

from siltstone.errors import CorruptObject, SiltstoneError, Unreachable, UsageError
from siltstone.store.directories import path_below
from siltstone.store.files import make_durable
from siltstone.store.filesystem import translate_errors as translate_file_errors
from siltstone.store.keyvalue.protocol import join_name
from siltstone.store.private import make_private_directory

DATABASE = ".db"


@contextmanager
def translate_errors(what: str, reads: Path | None = None) -> Iterator[None]:
    """Translate errors of RocksDB or the system into ours: what failed, and what to check.

    `reads` is the directory of a store being read: if it exists, files missing from a database were removed.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # from rocksdict, with text only
            raise _translate_message(str(error), what, reads) from error
        with translate_file_errors(what):
            raise
    except Exception as error:
        # rocksdict raises plain exceptions with RocksDB's text; any other type is our own mistake.
        if isinstance(error, SiltstoneError) or type(error) is not Exception:
            raise
        raise _translate_message(str(error).split("\n", 1)[0], what, reads) from error


def _translate_message(said: str, what: str, reads: Path | None) -> SiltstoneError:
    """The error people see for what RocksDB said while it was to do `what`."""
    lower = said.lower()
    lacks = any(words in lower for words in ("no such file", "is a directory", "not a directory"))
    if (lacks and reads is not None and reads.is_dir()) or "does not match existing comparator" in lower:
        return CorruptObject(f"cannot {what}: its RocksDB was altered or cut: {said}")
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
    return Unreachable(f"cannot {what}: {said}", advice=hint)


def database_options() -> Options:
    """Return the options with which every database is made and opened."""
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


def synced_options() -> WriteOptions:
    """Return options for writes that are on disk on return."""
    options = WriteOptions()
    options.sync = True
    return options


def open_database(path: Path, access: AccessType | None = None) -> Any:
    """Open the database at `path`, made if missing; the caller closes it. `access` defaults to reading and writing.

    Raises:
        UsageError: something in it is neither a file nor a directory.
    """
    _check_files(path)
    return Rdict(str(path), database_options(), access_type=access or AccessType.read_write())


def _check_files(path: Path) -> None:
    """Refuse links, pipes and devices in a database: RocksDB and rocksdict write through them, even when reading."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as found:
        for each in found:
            if not (each.is_file(follow_symlinks=False) or each.is_dir(follow_symlinks=False)):
                raise UsageError(f"{each.path} is a link, pipe or device, which RocksDB never makes: remove it")


@contextmanager
def _translate_altered(what: str) -> Iterator[None]:
    """Translate a refusal while reading into damage, from which a recovery goes back: somebody put the file there."""
    try:
        yield
    except UsageError as error:
        raise CorruptObject(f"cannot {what}: its RocksDB was altered: {error}") from error


class Databases:
    """One database per entry, in `<root>/<entry>/.db`, with a lock on the entry's directory.

    RocksDB allows one writing process, but gives readers no lock: they could miss data that is moved from its log to a
    table meanwhile. So readers share the directory's lock here.
    """

    def __init__(self, root: Path, label: str) -> None:
        self.root = root
        self.label = label

    def describe(self, entry: str, key: bytes = b"") -> str:
        """Return the name of a key or an entry for messages."""
        if key:
            return f"object {join_name(entry, key)} in {self.label}"
        return f"entry {entry!r} of {self.label}"

    def folder(self, entry: str) -> Path:
        """Return the directory of an entry, which contains its database.

        Raises:
            UsageError: a symbolic link is on the path, or is where the database should be.
        """
        folder = path_below(self.root, *(entry.split("/") if entry else ()))
        path_below(folder, DATABASE)
        return folder

    @contextmanager
    def open_to_read(self, entry: str, key: bytes = b"") -> Iterator[Any]:
        """Open an entry's database for reading, None if it is missing; it is not written meanwhile.

        Raises:
            CorruptObject: `folder` or RocksDB refuses what is there.
        """
        with _translate_altered(f"read {self.describe(entry, key)}"):
            folder = self.folder(entry)
        path = folder / DATABASE
        with (
            translate_errors(f"read {self.describe(entry, key)}", self.root),
            self.lock(folder, fcntl.LOCK_SH) as there,
        ):
            if not there or not (path / "CURRENT").exists():  # opening a missing one would make its directory
                yield None
                return
            with _translate_altered(f"read {self.describe(entry, key)}"):
                database = open_database(path, AccessType.read_only(False))
            try:
                yield database
            finally:
                database.close()

    @contextmanager
    def open_to_write(self, entry: str, key: bytes = b"") -> Iterator[Any]:
        """Open an entry's database for writing, made if missing; no other process writes it meanwhile."""
        folder = self.folder(entry)
        with translate_errors(f"write {self.describe(entry, key)}"):
            while True:
                # A deletion may remove an empty directory before or after mkdir sees it: make it again.
                with suppress(FileNotFoundError, FileExistsError):
                    self._make_directory(folder)
                with self.lock(folder, fcntl.LOCK_EX) as there:
                    if not there:
                        continue
                    database = open_database(folder / DATABASE)
                    try:
                        yield database
                    finally:
                        database.close()
                    for path in (folder, *folder.parents):  # another process may have made one and not synced it yet
                        make_durable(path)
                        if path == self.root:
                            return

    @contextmanager
    def lock(self, folder: Path, mode: int) -> Iterator[bool]:
        """Hold a directory's lock; False if the directory does not exist.

        Raises:
            Unreachable: another process holds it; transient.
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
        make_private_directory(folder)
        for path in missing:
            if path == self.root or path in self.root.parents:
                make_durable(path.parent)

    def remove_empty(self, folder: Path) -> None:
        """Remove `folder` and the directories above it, as long as they are empty and not locked."""
        while folder != self.root:
            try:
                with self.lock(folder, fcntl.LOCK_EX) as there:
                    if there:
                        folder.rmdir()
            except (OSError, Unreachable):
                return
            folder = folder.parent


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether an open directory is still the one at `folder`."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
