"""A small disk that can be filled: a file system of its own where this process may mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 512 << 20


@dataclass(frozen=True)
class Disk:
    """A directory for a warehouse; `mounted`, if it is a file system of its own, which can be full."""

    path: Path
    mounted: bool

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, free_bytes: int) -> None:
        """Leave so many bytes free."""
        status = os.statvfs(self.path)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - free_bytes))

    def clear(self) -> None:
        """Give the space back."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    """A new disk at `path`, gone when the block ends; a plain directory where nothing can be mounted."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=700", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield Disk(path, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=True)
