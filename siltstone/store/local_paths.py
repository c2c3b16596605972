"""Every path on this machine, built in this file and nowhere else; `store.paths` draws them with the object names."""

import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from siltstone.model import check_name
from siltstone.store.directories import below

CATALOG_BACKUPS = "catalog-*-r*.backup"


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """Paths on this machine below one warehouse directory."""

    root: Path

    @property
    def objects(self) -> Path:
        """Root of the filesystem store."""
        return self.root / "objects"

    @property
    def catalog(self) -> Path:
        """The SQLite catalog's file."""
        return self.root / "catalog.db"

    def work(self, stream: str, epoch: int) -> Path:
        """Return the directory of one writer epoch's working files; it may vanish at any time."""
        return below(self.root, "work", check_name("stream", stream), f"{epoch:08d}")

    def state(self, stream: str, epoch: int, operator: str, subtask: int) -> Path:
        """Return the directory of one subtask's working state."""
        return below(self.work(stream, epoch), "state", check_name("operator", operator), f"{subtask:05d}")

    def spark_log(self, stream: str, epoch: int) -> Path:
        """Return Spark's checkpointLocation of one epoch."""
        return below(self.work(stream, epoch), "spark")

    def sink(self, stream: str) -> Path:
        """Return the directory to which the stream's sink writes."""
        return below(self.root, "sink", check_name("stream", stream))

    def source(self, stream: str) -> Path:
        """Return the directory in which the stream's source may keep the files it reads."""
        return below(self.root, "source", check_name("stream", stream))

    def restored(self, stream: str, checkpoint: int) -> Path:
        """Return the default directory to which the state of one checkpoint is restored."""
        return below(self.root, "restored", check_name("stream", stream), f"{checkpoint:012d}")

    def restored_series(self, stream: str) -> Path:
        """Return the directory to which many checkpoints are restored, each under a label."""
        return below(self.root, "restored", check_name("stream", stream), "series")

    def scratch(self) -> Path:
        """Return the directory of files that processes need only while they read.

        A machine that has no warehouse directory, as an executor may, has the system's directory of temporary files.
        """
        return self.root / "work" / ".scratch" if self.root.is_dir() else Path(tempfile.gettempdir())

    @property
    def dagster(self) -> Path:
        """Dagster's home, for runs launched from its page."""
        return self.root / "dagster"


def catalog_backup(directory: Path, time: datetime, revision: str) -> Path:
    """Return the default path of a backup of a catalog with this revision at a time (UTC)."""
    return below(directory, f"catalog-{time:%Y%m%dT%H%M%S.%fZ}-r{revision}.backup")
