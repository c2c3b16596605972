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
