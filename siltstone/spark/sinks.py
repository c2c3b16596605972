"""Sinks: where an operator's output goes once its checkpoint is complete, and how it gets there from the store."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from siltstone.changelog.output import read_output
from siltstone.errors import SiltstoneError, StateError
from siltstone.store.filesystem import make_durable
from siltstone.stream import Stream

if TYPE_CHECKING:  # a stream's definition names its sinks, and is read where no Spark runs
    from pyspark.sql import DataFrame, SparkSession

    from siltstone.catalog.outbox import OutputRecord


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


def deliverers(
    spark: "SparkSession", stream: Stream, store_url: str, own: Path
) -> dict[str, Callable[["OutputRecord"], None]]:
    """Name of an output -> what hands it to its sink; a Parquet sink without a path writes to `own/<operator>`."""
    sinks: dict[str, Any] = {**stream.sinks, **parquet_sinks(stream.sinks, own)}
    return {name: _deliverer(spark, store_url, getattr(sink, "deliver", sink)) for name, sink in sinks.items()}


def _deliverer(
    spark: "SparkSession", store_url: str, deliver: Callable[["DataFrame", int], object]
) -> Callable[["OutputRecord"], None]:
    def give(output: "OutputRecord") -> None:
        try:
            deliver(staged_rows(spark, store_url, output), output.sink_id)
        except SiltstoneError:
            raise
        except Exception as error:  # a user's sink may fail in any way
            from siltstone.lifecycle.outbox import check_output
            from siltstone.store.open import open_store

            # Spark wraps what its tasks found: rows that were altered after the commit are not the sink's fault.
            check_output(open_store(store_url), output)
            said = (str(error).strip() or "no message").splitlines()[0]
            raise StateError(
                f"stream {output.stream}: the sink of {output.name} failed at checkpoint {output.checkpoint}: "
                f"{type(error).__name__}: {said}; the checkpoint is complete, and the next run delivers it first"
            ) from error

    return give


def staged_rows(spark: "SparkSession", store_url: str, output: "OutputRecord") -> "DataFrame":
    """The rows of an output, read from the store by Spark's tasks, each object verified before its first row."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from siltstone.store.open import open_store

    schema = from_arrow_schema(pa.ipc.read_schema(pa.py_buffer(output.arrow_schema)))
    objects, recorded = output.objects, output.arrow_schema
    if not objects:
        return spark.createDataFrame([], schema)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_store(store_url)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_output(store, objects[number], recorded)

    return spark.range(0, len(objects), 1, len(objects)).mapInArrow(read, schema)
