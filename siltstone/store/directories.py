"""Join and open paths below a directory, without following links that lead out of it (promise 8)."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from siltstone.errors import Unreachable, UsageError
from siltstone.store.private import private_mode

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def path_below(root: Path, *parts: str) -> Path:
    """Return `root / parts`, checked to be below `root`: each part is one plain name and not a link.

    `root` itself, and what is above it, may be symbolic links.

    Raises:
        UsageError: a part is not a plain name, or is a symbolic link.
        Unreachable: the system does not tell whether it is one.
    """
    path, there = root, True
    for part in parts:
        if not part or part in (".", "..") or "/" in part or os.sep in part or "\0" in part:
            raise UsageError(f"{part!r} cannot be a name below {root}: use one name without slashes")
        path = path / part
        if there:
            try:
                linked = stat.S_ISLNK(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                there = False
                continue
            except OSError as error:
                raise Unreachable(
                    f"cannot look at {path}: {error.strerror}; check the owner and permissions of what is above it"
                ) from error
            if linked:
                raise _leads_away_error(path, root)
    return path


def _leads_away_error(path: Path, root: Path) -> UsageError:
    return UsageError(f"{path} is a symbolic link, and may lead outside {root}: replace it by its target")


@contextmanager
def open_directories(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[list[int]]:
    """Open `root` and each directory on the way down `parts` (plain names); yield descriptors for use as `dir_fd`.

    Unlike a path, which is looked up at each use, they stay the same directories if names are changed meanwhile.

    Args:
        make: whether to make missing directories below `root`.

    Raises:
        UsageError: a symbolic link is on the way.
        OSError: a directory is missing or cannot be opened.
    """
    opened: list[int] = []
    try:
        opened.append(os.open(root, _DIRECTORY))
        for depth, part in enumerate(parts):
            try:
                opened.append(_open_directory(part, opened[-1], make=make))
            except OSError:
                with suppress(FileNotFoundError):
                    if stat.S_ISLNK(os.lstat(part, dir_fd=opened[-1]).st_mode):
                        raise _leads_away_error(root.joinpath(*parts[: depth + 1]), root) from None
                raise
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _open_directory(part: str, above: int, *, make: bool) -> int:
    try:
        return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(part, private_mode(of_directory=True), dir_fd=above)
    return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
