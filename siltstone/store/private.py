"""Permissions of new directories and files of the warehouse, the catalog and the working state.

Only their user may read them, unless `SILTSTONE_UMASK` (a umask) allows more: 027 lets the group read, 022 everybody.
The permissions are given when a directory or file is made: a library cannot change the umask of its process. RocksDB,
delta-rs and Spark make files by that umask, below directories of ours; files below a private directory are private
whatever their own permissions. Existing files are not changed.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from siltstone.errors import UsageError
from siltstone.store.files import draft_beside

VARIABLE = "SILTSTONE_UMASK"
ONLY_US = "077"


def own_umask() -> int:
    """Return the umask: the permissions that are not given.

    Raises:
        UsageError: the variable is not a umask, or takes away the user's own permissions.
    """
    text = os.environ.get(VARIABLE, ONLY_US)
    if not re.fullmatch("0?0[0-7]{2}", text):
        raise UsageError(f"{VARIABLE} is {text!r}: write three octal digits, such as 077 (nobody else), 027 or 022")
    return int(text, 8)


def private_mode(of_directory: bool = False) -> int:
    """The permissions of a private file or directory, for `os.open` and `os.mkdir`; UsageError as `own_umask`."""
    return (0o777 if of_directory else 0o666) & ~own_umask()


def make_private_directory(path: Path, exist_ok: bool = True) -> None:
    """Make a directory, and those above it, if they are missing."""
    try:
        path.mkdir(private_mode(of_directory=True), exist_ok=exist_ok)
    except FileNotFoundError:  # Path.mkdir(parents=True) makes those above it by the umask
        make_private_directory(path.parent)
        path.mkdir(private_mode(of_directory=True), exist_ok=exist_ok)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, private if it is new: the `opener` of `open`."""
    return os.open(path, flags, private_mode())


def write_private_file(path: Path, content: bytes | memoryview) -> None:
    """Write a whole file, private if it is new."""
    with open(path, "wb", opener=open_private) as file:
        file.write(content)


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a private file under another name beside `path` and rename it, so that no reader sees half of it.

    A link at `path` is replaced, not followed. Nothing is synced.

    Raises:
        OSError: it cannot be written; an existing file stays.
    """
    with draft_beside(path) as draft:
        with open(draft, "xb", opener=open_private) as file:
            file.write(content)
        os.replace(draft, path)


def make_private_file(path: Path, fill: Callable[[Path], None] | None = None) -> None:
    """Make a file if it is missing: empty, or filled by `fill`, which gets the path of an empty draft.

    An existing file is not opened, and a new one is closed before it gets its name: when a process closes a file, it
    loses all its locks on that file, also those of an open SQLite catalog, which would then be damaged.
    """
    if path.exists():
        return
    with draft_beside(path) as draft:
        make_empty_private_file(draft)
        if fill is not None:
            fill(draft)
        with suppress(FileExistsError):
            os.link(draft, path)


def make_empty_private_file(path: Path) -> None:
    """Make an empty file; FileExistsError if anything has its name, be it a link that leads nowhere."""
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
