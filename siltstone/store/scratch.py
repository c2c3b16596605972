"""Directories of one process that are removed at the end of a block, or by others once the process has ended."""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
        OSError: it cannot be made.
    """
    path = parent / f"{prefix}{uuid.uuid4().hex}"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        make_private_directory(path)
        held = stack.enter_context(open(path / LOCK, "w", opener=open_private))
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the directories that killed processes have left in `parent`."""
    for left in parent.glob(f"{prefix}*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    """Whether the process that made the directory has ended. Others may write to `parent`: no link is followed."""
    try:
        try:
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # not made yet, or its owner died before
            return time.time() - directory.lstat().st_mtime >= NEW_S
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - os.fstat(lock).st_mtime >= NEW_S
        finally:
            os.close(lock)
    except OSError:  # locked, another user's, or removed meanwhile
        return False
