"""A sink that writes Parquet files, with one directory per checkpoint."""

import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from siltstone.store.files import make_durable
from siltstone.store.private import make_private_directory, private_mode

if TYPE_CHECKING:  # definitions of streams are also loaded in processes without Spark
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class ParquetSink:
    """Writes Parquet files, one directory per checkpoint, into a directory that every executor can reach.

        <path>/
          checkpoint=000000000012/       delivered: readers of the path see exactly these directories
          _staged/000000000013-<id>/     being delivered; readers skip it

    A rename publishes a checkpoint's directory atomically, and it is never replaced: the same id has the same rows. A
    second delivery, after a crash or by a newer writer, therefore changes nothing (exactly-once output, promise 2). The
    files of an attempt that failed are removed once its checkpoint is published.

    Args:
        path: a directory; None for `sink/<stream>/<operator>` in the warehouse.
    """

    path: Path | str | None = None

    def deliver(self, rows: "DataFrame", checkpoint: int) -> None:
        """Write the rows and publish them by a rename; does nothing if the checkpoint is published."""
        published = self.published_path(checkpoint)
        if not published.exists():
            staged = self._staged / f"{checkpoint:012d}-{uuid.uuid4().hex}"
            made = [path for path in (self._root, *self._root.parents) if not path.exists()]
            make_private_directory(self._staged)
            try:
                rows.coalesce(1).write.mode("overwrite").parquet(
                    f"file://{staged}"
                )  # not escaped, because Hadoop does not unescape it
                staged.chmod(private_mode(of_directory=True))
                for file in [*staged.iterdir(), staged, self._staged]:
                    make_durable(file)
                os.rename(staged, published)
                for path in made:
                    make_durable(path.parent)
            except Exception:
                if not published.exists():  # else another process was faster
                    raise
        make_durable(published.parent)
        self._remove_left_over()

    def published_path(self, checkpoint: int) -> Path:
        """Return the directory of a checkpoint's published rows."""
        return self._root / f"checkpoint={checkpoint:012d}"

    def list_published(self) -> set[int]:
        """Return the ids of the checkpoints that are published."""
        found = self._root.glob("checkpoint=*")
        return {int(path.name.removeprefix("checkpoint=")) for path in found if path.is_dir()}

    def _remove_left_over(self) -> None:
        for staged in self._staged.glob("[0-9]*-*"):
            checkpoint = staged.name.partition("-")[0]
            if checkpoint.isdigit() and self.published_path(int(checkpoint)).exists():
                shutil.rmtree(staged, ignore_errors=True)

    @property
    def _root(self) -> Path:
        assert self.path is not None, "the runner gives every Parquet sink its path"
        # Absolute, because Spark gets it as a URL.
        return Path(self.path).absolute()

    @property
    def _staged(self) -> Path:
        return self._root / "_staged"
