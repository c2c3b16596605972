"""Directories of one process that are removed at the end of a block, or by others once the process has ended."""

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from siltstone.store.private import make_private_directory, open_private

SCRATCH = "siltstone-files-"
"""prefix of directories with files that are needed only while they are read"""
LOCK = "lock"
"""file that the process that made the directory keeps locked"""
NEW_S = 5.0
"""age in seconds below which a directory counts as in use, because its owner may not have locked it yet"""


@contextmanager
def hold_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a locked directory in `parent`, and remove it at the end of the block.

    Raises:
        OSError: it cannot be made, or another process removed it as abandoned, because this one was stopped for long
            before it locked the directory.
    """
    path = parent / f"{prefix}{uuid.uuid4().hex}"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        make_private_directory(path)
        held = stack.enter_context(open(path / LOCK, "w", opener=open_private))
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "another process removed it as abandoned, run this again", str(path))
        yield path


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the directories that killed processes have left in `parent`."""
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # locked, another user's, or removed meanwhile
            _remove_if_abandoned(left)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory whose process has ended. Others may write to its parent: no link is followed.

    The lock is held until everything is removed: a process that wakes up before it has locked its directory waits for
    that, and sees that the lock is gone.
    """
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - directory.lstat().st_mtime >= NEW_S:
            _remove_unlocked(directory)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(lock).st_mtime >= NEW_S:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory without a lock: its process ended before it made the lock, or while it removed everything."""
    try:
        directory.rmdir()
    except OSError:
        if not (directory / LOCK).exists():  # else its process has just made it
            shutil.rmtree(directory, ignore_errors=True)
