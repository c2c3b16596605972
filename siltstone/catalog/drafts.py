"""Write files that get their name once they are complete and synced; until then they are drafts beside that name.

    NAME.part         the draft: a SQLite database, which may have a log beside it
    NAME.part.lock    locked by the process that writes the draft

The lock is made first and removed last, and is released if its process dies. So a draft whose lock is free was left by
a killed process, and the next process that writes the same file removes it. A draft without a lock is not ours.

The lock is a separate file because SQLite locks the draft itself, and some file systems do not tell both kinds of
locks apart.
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from siltstone.errors import Unreachable, UsageError
from siltstone.store.files import make_durable
from siltstone.store.private import make_empty_private_file

SQLITE_FILES = ("", "-wal", "-shm", "-journal")
"""suffixes of the files that make up a SQLite database"""
_LOCK = ".part.lock"


def check_absent(path: Path) -> None:
    """Check that `path` does not exist.

    Raises:
        UsageError: it does.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already: name another file")


@contextmanager
def whole_file(path: Path, check: Callable[[Path], None] = check_absent) -> Iterator[Path]:
    """Yield an empty draft that becomes `path`, synced, if the block succeeds, and is removed if it fails.

    Args:
        check: refuses a `path` that is taken.

    Raises:
        UsageError: `path` is taken, or another process writes it.
        Unreachable: the file cannot be written.
    """
    try:
        with _own_draft(path) as draft:
            check(path)
            make_empty_private_file(draft)
            yield draft
            make_durable(draft)
            os.link(draft, path)
        make_durable(path.parent)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already: name another file") from error
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Unreachable(f"cannot write {path}: {reason}; check its directory and its free space") from error


def remove_leftovers(directory: Path, pattern: str) -> None:
    """Remove drafts that killed processes left in a directory, of files whose names match `pattern`.

    Raises:
        Unreachable: they cannot be removed.
    """
    try:
        for lock in directory.glob(pattern + _LOCK):
            with _hold_lock(lock) as held:
                if held:
                    _remove(lock.with_suffix(""))
    except OSError as error:
        raise Unreachable(f"cannot clean {directory}: {error.strerror}; check its owner") from error


@contextmanager
def _own_draft(path: Path) -> Iterator[Path]:
    """Lock the draft of `path` for this process, and remove it at the end."""
    draft, lock = path.with_name(f"{path.name}.part"), path.with_name(path.name + _LOCK)
    if os.path.lexists(draft) and not os.path.lexists(lock):
        raise UsageError(f"{draft} exists and was not left by a backup: move it away, or name another file")
    with _hold_lock(lock) as held:
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
def _hold_lock(path: Path) -> Iterator[bool]:
    """Hold the lock `path`, made if needed, and remove it at the end; yield False if another process holds it."""
    descriptor = _lock(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of a fork may hold the descriptor open
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock at `path`; None if another process holds it."""
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
        os.close(descriptor)  # its holder has just removed it
