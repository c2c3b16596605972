"""Who may read what is made here: directories and files of the warehouse, the catalog and the working state.

Only their user, unless `SILTSTONE_UMASK` says otherwise, as umask does: 027 lets the group read, 022 everybody. What
lies below a private directory is private whatever its own permissions are. What is there already is left as it is.
"""

import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from siltstone.errors import UsageError

VARIABLE = "SILTSTONE_UMASK"
ONLY_US = "077"


def own_umask() -> int:
    """The permissions that are not given.

    Raises:
        UsageError: the variable is no umask, or takes its user's own permissions away.
    """
    text = os.environ.get(VARIABLE, ONLY_US)
    if not re.fullmatch("0?0[0-7]{2}", text):
        raise UsageError(f"{VARIABLE} is {text!r}: write three octal digits, such as 077 (nobody else), 027 or 022")
    return int(text, 8)


def make_private_directory(path: Path) -> None:
    """Make a directory where it is missing, and those above it."""
    path.mkdir(mode=0o777 & ~own_umask(), parents=True, exist_ok=True)


def make_private_file(path: Path, fill: Callable[[Path], None] | None = None) -> None:
    """Make a file where it is missing: empty, or as `fill` leaves it, which gets the path of an empty draft.

    What is there is not opened, and what is made has been closed before it has the name: when a process closes a file,
    all its locks on that file go, those of a catalog that is open in SQLite too, and then it is soon malformed.
    """
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 & ~own_umask()))
    try:
        if fill is not None:
            fill(draft)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
