"""Permissions of new directories and files of the warehouse, the catalog and the working state.

Only their user may read them, unless `SILTSTONE_UMASK` (a umask) allows more: 027 lets the group read, 022 everybody.
Files below a private directory are private whatever their own permissions. Existing files are not changed.
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


def private_mode() -> int:
    """The permissions of a private file, for `os.open`; UsageError as `own_umask`."""
    return 0o666 & ~own_umask()


def make_private_directory(path: Path) -> None:
    """Make a directory, and those above it, if they are missing."""
    path.mkdir(mode=0o777 & ~own_umask(), parents=True, exist_ok=True)


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
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, private_mode()))
