"""Objects as files of one directory tree, on a POSIX file system.

An object is written under `.tmp/` of the same file system, fsynced, and hard-linked to its name. A link never replaces
a file, so exactly one of several writers of a name wins, and a reader sees a complete object or none (objects are
written once: promise 6).
"""

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import pyarrow as pa

from siltstone.errors import CorruptObject, ObjectExists, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.store.base import Remark, Unfinished
from siltstone.store.checksums import DEFAULT, OPTION, Checksum, verify
from siltstone.store.directories import open_directories, path_below
from siltstone.store.files import make_durable
from siltstone.store.paths import TEMPORARY, check_object_name, check_prefix, is_object_name
from siltstone.store.private import make_private_directory, private_mode

_PIECE_BYTES = 1 << 20
_ON_THEIR_WAY_BYTES = 8 << 20
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_NOT_NEEDED = getattr(os, "POSIX_FADV_DONTNEED", 0)  # not on every system
_DEEPEST = 64
"""maximum levels of directories that a listing descends; Siltstone makes at most four"""
_HINTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "raise the limit on file size",
    errno.EROFS: "mount the file system for writing, or name another warehouse",
    errno.EACCES: "check the owner and permissions",
    errno.EPERM: "check the owner and permissions, and that the file system has hard links",
    errno.ENOTDIR: "there is a file where a directory is needed: remove it, or name another warehouse",
    errno.ELOOP: "there is a symbolic link where a file should be: remove it",
    errno.EMFILE: "raise the limit on open files",
}


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate an OSError into Unreachable: `what`, the system's reason, and what to check."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check that the disk is there and healthy")
        raise Unreachable(f"cannot {what}: {error.strerror or error}", advice=hint) from error


class FileWriter:
    """`ObjectWriter` of one temporary file; hashes and counts the bytes."""

    def __init__(self, descriptor: int, label: str, checksums: str) -> None:
        self.stored: StoredObject | None = None
        self.closed = False
        self.bytes = 0
        self.checksum = Checksum(checksums)
        self._descriptor = descriptor
        self._label = label
        self._on_their_way = 0

    def write(self, data: bytes | memoryview | pa.Buffer) -> int:
        """Append bytes; Unreachable if the disk refuses them."""
        if self.closed:
            raise ValueError(f"{self._label} is already closed")
        view = memoryview(data).cast("B")
        self.checksum.update_beside(view)
        with translate_errors(f"write {self._label}"):
            for start in range(0, len(view), _PIECE_BYTES):
                self._append(view[start : start + _PIECE_BYTES])
        self.checksum.join()
        return len(view)

    def flush(self) -> None:
        """Do nothing: data is durable only once the block ends."""

    def _append(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            done += os.write(self._descriptor, piece[done:])
        self.bytes += done
        if self.bytes - self._on_their_way >= _ON_THEIR_WAY_BYTES and hasattr(os, "posix_fadvise"):
            # Starts writing to the disk without waiting, so that less is left for fsync.
            os.posix_fadvise(self._descriptor, self._on_their_way, self.bytes - self._on_their_way, _NOT_NEEDED)
            self._on_their_way = self.bytes


class FilesystemStore:
    """A `Store` under the directory `root`, made at the first write. Safe for many threads and processes.

    Symbolic links below `root` are neither followed nor listed: no path may lead outside the warehouse (promise 8).
    Writes and deletions go through open directories, so that a directory replaced by a link meanwhile does no harm.

    Durable on return: the file and each directory on its way up to `root` are fsynced. A process killed while it writes
    leaves only a file under `.tmp/`.
    """

    ranged = True

    def __init__(self, root: Path, checksums: str = DEFAULT) -> None:
        self.root = root.absolute()
        self.checksums = checksums
        self.label = self.root.as_uri()
        self.url = self.label if checksums == DEFAULT else f"{self.label}?{OPTION}={checksums}"

    def __repr__(self) -> str:
        return f"FilesystemStore({str(self.root)!r})"

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        """Store a new object: atomic, durable on return (`Store.put`)."""
        with self.create(name) as writer:
            writer.write(data)
        assert writer.stored is not None
        return writer.stored

    @contextmanager
    def create(self, name: str) -> Iterator[FileWriter]:
        """Write a new object piece by piece; it appears complete when the block ends, or not at all."""
        label = self._label(name)
        with translate_errors(f"write {label}"):
            if self._path(name).exists():
                raise ObjectExists(f"{label} already exists: objects are written once")
            self._make_root()
        with ExitStack() as held:
            with translate_errors(f"write {label}"):
                directory = held.enter_context(open_directories(self.root, [TEMPORARY], make=True))[-1]
                temporary = f"{os.getpid()}-{uuid.uuid4().hex}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_LINK
                descriptor = os.open(temporary, flags, private_mode(), dir_fd=directory)
            try:
                writer = FileWriter(descriptor, label, self.checksums)
                yield writer
                writer.closed = True
                with translate_errors(f"write {label}"):
                    os.fsync(descriptor)
                    self._link(directory, temporary, name)
                writer.stored = StoredObject(name, writer.bytes, writer.checksum.text())
            finally:
                os.close(descriptor)
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)

    def read(self, stored: StoredObject) -> pa.Buffer:
        """Read a whole object; its size and checksum are verified before any byte is returned."""
        label = self._label(stored.name)
        size, data = self._copy_bytes(stored.name, 0, stored.bytes)
        if size != stored.bytes or data is None:
            raise CorruptObject(f"{label} has {size} bytes instead of {stored.bytes}")
        verify(data, stored.checksum, label)
        return data

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Read exactly `length` bytes at `offset`, without verifying them."""
        size, data = self._copy_bytes(name, offset, length)
        if data is None:
            raise CorruptObject(f"{self._label(name)} has {size} bytes and should have {offset + length}")
        return data

    def _copy_bytes(self, name: str, offset: int, length: int) -> tuple[int, pa.Buffer | None]:
        """Return a file's size and a copy of some of its bytes; None if it is too short.

        The file is not mapped: its bytes could be altered after they were verified, and truncating a mapped file kills
        the process.
        """
        label = self._label(check_object_name(name))
        try:
            path = self._path(name)
        except UsageError as error:
            raise CorruptObject(f"{label} is missing: {error}") from None
        try:
            with _open_to_read(path) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise CorruptObject(f"{label} is missing: its path is not a regular file")
                if offset + length > found.st_size:
                    return found.st_size, None
                data, done = pa.allocate_buffer(length), file.seek(offset) - offset
                view = memoryview(data).cast("B") if length else memoryview(b"")
                while done < length:
                    count = file.readinto(view[done:])
                    if not count:
                        return offset + done, None
                    done += count
                return found.st_size, data
        except OSError as error:
            with translate_errors(f"read {label}"):
                if path.is_file():
                    raise
                if not self.root.is_dir():
                    raise Unreachable(f"cannot read {label}: its store is missing; mount or restore it") from error
            raise CorruptObject(f"{label} is missing") from None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every object whose name starts with `prefix`, in name order, lazily."""
        with translate_errors(f"list {self.url}"):
            yield from self._walk("", check_prefix(prefix))

    def modified_at(self, names: Iterable[str]) -> dict[str, datetime]:
        """Return when each object was written: its file's time."""
        found = {}
        for name in names:
            with translate_errors(f"list {self._label(check_object_name(name))}"), suppress(FileNotFoundError):
                found[name] = datetime.fromtimestamp(self._path(name).stat().st_mtime, UTC)
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, and directories left empty; a missing object is no error."""
        for name in names:
            *parts, last = check_object_name(name).split("/")
            with (
                translate_errors(f"delete {self._label(name)}"),
                suppress(FileNotFoundError),
                open_directories(self.root, parts) as directories,
            ):
                with suppress(FileNotFoundError):
                    os.unlink(last, dir_fd=directories[-1])
                with suppress(OSError):  # not empty, or already gone: then the directories above stay, too
                    for part, above in zip(reversed(parts), directories[-2::-1], strict=True):
                        os.rmdir(part, dir_fd=above)

    def list_unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """List the files under `.tmp/`; the names of their objects are not known."""
        check_prefix(prefix)
        with translate_errors(f"list {self.url}"):
            try:
                found = sorted(os.scandir(path_below(self.root, TEMPORARY)), key=lambda entry: entry.name)
            except FileNotFoundError:
                return
            for entry in found:
                if entry.is_dir(follow_symlinks=False) or not is_object_name(entry.name):
                    continue  # not made by a writer
                with suppress(FileNotFoundError):
                    began = entry.stat(follow_symlinks=False).st_mtime
                    yield Unfinished(entry.name, None, datetime.fromtimestamp(began, UTC))

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Delete files under `.tmp/`; a writer that still has one can no longer link it."""
        for write in unfinished:
            token = check_object_name(write.token)
            with (
                translate_errors(f"delete {TEMPORARY}/{token} in {self.url}"),
                suppress(FileNotFoundError),
                open_directories(self.root, [TEMPORARY]) as directories,
            ):
                os.unlink(token, dir_fd=directories[-1])

    def check(self, *, writable: bool) -> None:
        """Check that the directory can be read, or written; a missing one is made by the first write."""
        with translate_errors(f"use {self.url}"):
            if not self.root.exists():
                return
            if not self.root.is_dir():
                raise UsageError(f"{self.url} is a file: name a directory")
        wanted = os.R_OK | os.X_OK | (os.W_OK if writable else 0)
        if not os.access(self.root, wanted):
            what = "written" if writable else "read"
            raise Unreachable(f"{self.url} cannot be {what}: check its owner, permissions and mount")

    def remarks(self) -> Sequence[Remark]:
        """Return none: the file system also belongs to others."""
        return ()

    def _label(self, name: str) -> str:
        return f"object {name} in {self.url}"

    def _path(self, name: str) -> Path:
        """Return an object's path.

        Raises:
            UsageError: the name is not an object name, or a symbolic link is on its path.
        """
        return path_below(self.root, *check_object_name(name).split("/"))

    def _walk(self, directory: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield objects below `directory` ("" or ending in a slash), skipping directories that cannot match."""
        try:
            with os.scandir(self.root / directory) as entries:
                # A directory sorts with its slash, which puts full names in order: "a.b" < "a/b" < "a0".
                own = [e for e in entries if not (e.name.startswith(".") or e.is_symlink())]
                found = sorted((e.name + "/" * e.is_dir(), e) for e in own)
        except FileNotFoundError:
            return  # nothing was ever written, or a delete emptied it meanwhile
        for part, entry in found:
            name = directory + part
            if name.endswith("/"):
                near = name.count("/") <= _DEEPEST
                if near and (name.startswith(prefix) or prefix.startswith(name)):
                    yield from self._walk(name, prefix)
            elif name.startswith(prefix):
                with suppress(FileNotFoundError):
                    yield name, entry.stat().st_size

    def _link(self, temporary: int, file: str, name: str) -> None:
        """Link `file` in the directory `temporary` to its object's name, and make the directories above durable."""
        *parts, last = name.split("/")
        while True:
            try:
                with open_directories(self.root, parts, make=True) as directories:
                    os.link(file, last, src_dir_fd=temporary, dst_dir_fd=directories[-1], follow_symlinks=False)
                    for directory in reversed(directories):  # another process may have made one and not synced it yet
                        os.fsync(directory)
                return
            except FileExistsError:
                raise ObjectExists(f"{self._label(name)} already exists: objects are written once") from None
            except FileNotFoundError:
                os.stat(file, dir_fd=temporary, follow_symlinks=False)  # fails if a sweep has discarded it
                # a deletion removed the empty directory meanwhile: make it again

    def _make_root(self) -> None:
        """Make `root` and missing directories above it, and make them durable."""
        missing, directory = [], self.root
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for path in reversed(missing):
            try:
                make_private_directory(path)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
            make_durable(path.parent)


def _open_to_read(path: Path) -> FileIO:
    """Open a file to read; refuse a symbolic link, even one made meanwhile, and do not wait for a pipe."""
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | _NO_LINK | _NO_WAIT))
