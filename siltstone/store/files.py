"""Write local files that are complete or absent."""

import os
import uuid
from pathlib import Path


def make_durable(path: Path) -> None:
    """fsync a file, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file under a temporary name beside it and rename it, so that no reader sees half of it.

    Raises:
        OSError: it cannot be written; an existing file stays.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            file.write(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
