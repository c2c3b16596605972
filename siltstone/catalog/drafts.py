"""Files that get their name once they are whole and synced; until then they are drafts, beside that name.

    NAME.part         the draft: a SQLite database, which may have a log beside it
    NAME.part.lock    locked by the process that writes the draft

The lock comes first and goes last, and ends with its process. So a draft whose lock nobody holds is what a killed
process left, and the next process that writes the same file removes it. A draft that has no lock beside it is not ours.

The lock is a file of its own because SQLite locks the draft itself: some file systems count both kinds of locks as one.
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from siltstone.errors import Unreachable, UsageError
from siltstone.store.files import make_durable
from siltstone.store.private import own_umask

SQLITE_FILES = ("", "-wal", "-shm", "-journal")
"""endings of the files that are a SQLite database together"""
_LOCK = ".part.lock"


def check_absent(path: Path) -> None:
    """Make sure that there is nothing at `path`.

    Raises:
        UsageError
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} is there already: name another file")


@contextmanager
def whole_file(path: Path, check: Callable[[Path], None] = check_absent) -> Iterator[Path]:
    """Yield an empty draft that becomes `path`, synced, when the block ends well, and is gone when it does not.

    Args:
        check: refuses a `path` that is taken.

    Raises:
        UsageError: `path` is taken, or another process writes it.
        Unreachable: the file cannot be written.
    """
    try:
        with _own_draft(path) as draft:
            check(path)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 & ~own_umask()))
            yield draft
            make_durable(draft)
            os.link(draft, path)
        make_durable(path.parent)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already: name another file") from error
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Unreachable(f"cannot write {path}: {reason}; check its directory and the space left there") from error


def remove_leftovers(directory: Path, pattern: str) -> None:
    """Remove the drafts that killed processes left in a directory, of files whose name matches `pattern`.

    Raises:
        Unreachable: they cannot be removed.
    """
    try:
        for lock in directory.glob(pattern + _LOCK):
            with _held_lock(lock) as held:
                if held:
                    _remove(lock.with_suffix(""))
    except OSError as error:
        raise Unreachable(f"cannot clean {directory}: {error.strerror}; check its owner") from error


@contextmanager
def _own_draft(path: Path) -> Iterator[Path]:
    """The draft of `path`, which is not there yet, for this process alone; removed at the end."""
    draft, lock = path.with_name(f"{path.name}.part"), path.with_name(path.name + _LOCK)
    if os.path.lexists(draft) and not os.path.lexists(lock):
        raise UsageError(f"{draft} is there, and no backup left it: move it away, or name another file")
    with _held_lock(lock) as held:
        if not held:
            raise UsageError(f"another process writes {path}: wait until it has ended, or name another file")
        _remove(draft)  # never written to: a killed process may have given it its name already
        try:
            yield draft
        finally:
            _remove(draft)


def _remove(draft: Path) -> None:
    for ending in SQLITE_FILES:
        Path(str(draft) + ending).unlink(missing_ok=True)


@contextmanager
def _held_lock(path: Path) -> Iterator[bool]:
    """Hold the lock `path`, made if need be, and remove it at the end; False if another process holds it."""
    descriptor = _lock(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of a fork may hold the descriptor open
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, which is at `path`; None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.path.samestat(os.fstat(descriptor), os.lstat(path))
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            there = False
        except BaseException:
            os.close(descriptor)
            raise
        if there:
            return descriptor
        os.close(descriptor)  # who held it has just removed it
