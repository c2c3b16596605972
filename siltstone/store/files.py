"""Write local files that are complete or absent."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_durable(path: Path) -> None:
    """fsync a file, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Let a file that never changes be in another place, too."""
    try:
        os.link(source, target)
    except OSError:  # the file system has no links, or is another one
        shutil.copy2(source, target)


@contextmanager
def draft_beside(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` that nothing else has; a file of that name is removed when the block ends."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file under another name beside `path` and rename it, so that no reader sees half of it.

    A link at `path` is replaced, not followed. Nothing is synced.

    Args:
        mode: permissions, less those that the process's umask takes away.

    Raises:
        OSError: it cannot be written; an existing file stays.
    """
    with draft_beside(path) as draft:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
        os.replace(draft, path)
