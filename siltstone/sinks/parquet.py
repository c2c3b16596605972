"""A sink of Parquet files, a directory per checkpoint."""

import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from siltstone.store.files import make_durable

if TYPE_CHECKING:  # a stream's definition names its sinks, and is read where no Spark runs
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class ParquetSink:
    """Parquet files, a directory per checkpoint, in a directory that every executor sees.

        <path>/
          checkpoint=000000000012/       delivered: any reader of the path sees these rows and no others
          _staged/000000000013-<id>/     being delivered; readers skip it

    A checkpoint's directory appears at once, by a rename, and is never replaced: the same id brings the same rows. So
    whoever delivers it once more, after a crash or beside a newer writer, changes nothing (promise 2). What stays of an
    attempt that ended is removed only once its checkpoint is in sight.

    Args:
        path: a directory; None lets the runner use `sink/<stream>/<operator>` in the warehouse.
    """

    path: Path | str | None = None

    def deliver(self, rows: "DataFrame", checkpoint: int) -> None:
        """Write the rows and rename them into sight; done already is done."""
        published = self.published(checkpoint)
        if not published.exists():
            staged = self._staged / f"{checkpoint:012d}-{uuid.uuid4().hex}"
            made = [path for path in (self._root, *self._root.parents) if not path.exists()]
            try:
                rows.coalesce(1).write.mode("overwrite").parquet(
                    f"file://{staged}"
                )  # not escaped: Hadoop takes it as it stands
                for file in [*staged.iterdir(), staged, self._staged]:
                    make_durable(file)
                os.rename(staged, published)
                for path in made:
                    make_durable(path.parent)
            except Exception:
                if not published.exists():  # else another process has been faster
                    raise
        make_durable(published.parent)
        self._remove_left_over()

    def published(self, checkpoint: int) -> Path:
        """Where a checkpoint's rows are in sight."""
        return self._root / f"checkpoint={checkpoint:012d}"

    def all_published(self) -> set[int]:
        """The checkpoints whose rows are in sight."""
        found = self._root.glob("checkpoint=*")
        return {int(path.name.removeprefix("checkpoint=")) for path in found if path.is_dir()}

    def _remove_left_over(self) -> None:
        for staged in self._staged.glob("[0-9]*-*"):
            checkpoint = staged.name.partition("-")[0]
            if checkpoint.isdigit() and self.published(int(checkpoint)).exists():
                shutil.rmtree(staged, ignore_errors=True)

    @property
    def _root(self) -> Path:
        assert self.path is not None, "the runner gives every Parquet sink its path"
        # Absolute, because Spark takes it as a URL.
        return Path(self.path).absolute()

    @property
    def _staged(self) -> Path:
        return self._root / "_staged"


def parquet_sinks(sinks: Mapping[str, object], own: Path) -> dict[str, ParquetSink]:
    """Those of a stream's sinks that write Parquet, each with its path: `own/<name>` where it names none."""
    return {
        name: sink if sink.path is not None else replace(sink, path=own / name)
        for name, sink in ((name, ParquetSink() if sink is None else sink) for name, sink in sinks.items())
        if isinstance(sink, ParquetSink)
    }
