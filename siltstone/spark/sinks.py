"""Sinks: where an operator's output goes, exactly once for each completed checkpoint."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from siltstone.store.filesystem import make_durable
from siltstone.stream import SinkFunction

if TYPE_CHECKING:  # a stream's definition names its sinks, and is read where no Spark runs
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class ParquetSink:
    """Parquet files, a directory a checkpoint, in a directory that every executor sees.

        <path>/
          checkpoint=000000000012/       published: any reader of the path sees these rows and no others
          _staged/000000000013-00000002/ written, not yet part of a completed checkpoint (id-epoch); readers skip it

    Rows are staged and made durable before the checkpoint completes and renamed into sight after it, so a crash at
    any moment leaves each checkpoint's rows there once (promise 2). An older writer stages under its own epoch and
    never publishes. What a checkpoint published that was given up since stays in sight until it comes again, with the
    same rows, and is replaced by it.

    Args:
        path: a directory; None lets the runner use `sink/<stream>/<operator>` in the warehouse.
    """

    path: Path | str | None = None

    def write(self, rows: "DataFrame", checkpoint: int, epoch: int) -> None:
        """Stage the rows; what an earlier attempt of the same epoch staged is replaced."""
        staged = self._staged(checkpoint, epoch)
        rows.coalesce(1).write.mode("overwrite").parquet(staged.as_uri())
        for file in [*staged.iterdir(), staged, staged.parent]:
            make_durable(file)

    def publish(self, checkpoint: int, epoch: int) -> None:
        """Rename the staged rows into sight; done already is done."""
        staged, published = self._staged(checkpoint, epoch), self.published(checkpoint)
        if not staged.exists():
            return
        replaced = staged.with_name(f"{staged.name}-replaced")
        if published.exists():
            os.rename(published, replaced)
        try:
            os.rename(staged, published)
        except FileNotFoundError:  # a newer writer has removed it since, and published its own
            if replaced.exists():
                os.rename(replaced, published)
            raise
        make_durable(published.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def recover(self, completed: int, epoch: int | None) -> None:
        """Publish what a crash left staged by the newest completed checkpoint, remove all that never completed."""
        root = self._root / "_staged"
        if not root.is_dir():
            return
        for staged in sorted(root.iterdir()):
            if epoch is not None and staged == self._staged(completed, epoch):
                self.publish(completed, epoch)
            shutil.rmtree(staged, ignore_errors=True)

    def published(self, checkpoint: int) -> Path:
        """Where a checkpoint's rows are in sight."""
        return self._root / f"checkpoint={checkpoint:012d}"

    def all_published(self) -> set[int]:
        """The checkpoints whose rows are in sight."""
        found = self._root.glob("checkpoint=*")
        return {int(path.name.removeprefix("checkpoint=")) for path in found if path.is_dir()}

    @property
    def _root(self) -> Path:
        assert self.path is not None, "the runner gives every Parquet sink its path"
        # Absolute, because Spark takes it as a URL.
        return Path(self.path).absolute()

    def _staged(self, checkpoint: int, epoch: int) -> Path:
        return self._root / "_staged" / f"{checkpoint:012d}-{epoch:08d}"


def parquet_sinks(sinks: Mapping[str, object], own: Path) -> dict[str, ParquetSink]:
    """Those of a stream's sinks that write Parquet, each with its path: `own/<operator>` where it names none."""
    return {
        operator: sink if sink.path is not None else replace(sink, path=own / operator)
        for operator, sink in sinks.items()
        if isinstance(sink, ParquetSink)
    }


@dataclass(frozen=True)
class FunctionSink:
    """The user's own function, called with the rows and the checkpoint id before the checkpoint completes.

    After a crash the same id may come again: the function must be idempotent by it, as Spark asks of `foreachBatch`.
    """

    function: SinkFunction

    def write(self, rows: "DataFrame", checkpoint: int, epoch: int) -> None:
        """Call the function."""
        self.function(rows, checkpoint)

    def publish(self, checkpoint: int, epoch: int) -> None:
        """Nothing is left to do."""

    def recover(self, completed: int, epoch: int | None) -> None:
        """Nothing was staged."""
