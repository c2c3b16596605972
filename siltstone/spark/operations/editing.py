"""Apply an edit of a stream's state as a new checkpoint."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from siltstone.catalog.records.edits import Edit
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.edit import COUNTS, EditOperator, cast_changes, check_columns, find_editable, optional_columns
from siltstone.errors import UsageError
from siltstone.result import Result
from siltstone.retention.leases import this_process
from siltstone.run.task import StepTask
from siltstone.settings import Settings
from siltstone.spark.executor import map_in_arrow
from siltstone.spark.failures import explain
from siltstone.spark.operations.changing import check_changeable, hold_epoch_for_change
from siltstone.spark.operations.proving import verify
from siltstone.spark.session import cores, needs_spark, spark_session
from siltstone.spark.step import StepRun, acknowledgements, output_rows, run_step, step_frame
from siltstone.spark.types import spark_type
from siltstone.spark.versions import arrow_schema
from siltstone.state.schema import DELETED, TableSchema
from siltstone.state.variables import Variable
from siltstone.store.checksums import Checksum
from siltstone.stream import Stream

_REFUSED = "__refused"
"""column with the reason why the rows cannot be taken, in one row of its own"""
_BATCH_ROWS = 1 << 16
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class EditResult(Result):
    """What an edit changed, or, if `checkpoint` is None, would change.

    Attributes:
        upserts: rows put, of which `inserts` have a new key; `inserts` is None in a dry run.
        deletes: rows to delete, of which `absent` did not exist; `absent` is None in a dry run.
        proven: whether the new checkpoint restores to the edited state; if not, `failure` says why.
    """

    stream: str
    operator: str
    variable: str
    checkpoint: int | None
    upserts: int
    inserts: int | None
    deletes: int
    absent: int | None
    source: str
    source_checksum: str | None
    digest: str | None
    proven: bool | None
    failure: str | None
    seconds: float


@dataclass(frozen=True)
class _EditRows:
    """Rows to apply, before they are read: the name of their source, and a file's checksum."""

    source: str
    checksum: str | None
    rows: Path | DataFrame


@needs_spark
def edit(
    settings: Settings, stream: Stream, operator: str, variable: str, rows: Path | DataFrame, *, dry_run: bool = False
) -> EditResult:
    """Check the rows in Spark tasks, and take a step that applies them (`StreamClient.edit`)."""
    start = time.perf_counter()
    edited, schema = find_editable(stream, operator, variable)
    optional = optional_columns(edited, variable)
    given = _open_rows(rows, schema, optional)
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        options = check_changeable(warehouse.catalog, stream, settings.parallelism or 1)
        # At the same parallelism, working state on this machine is reused.
        last = warehouse.catalog.checkpoints.get_latest(stream.name).statistics["parallelism"]
        spark = spark_session(settings.master, settings.spark)
        frame = _check_frame(spark, given, schema, optional, edited.variables()[variable]).persist()
        try:
            puts, deletes = _check_rows(frame, schema, given.source)
            found = EditResult(
                *(stream.name, operator, variable, None, puts, None, deletes, None, given.source, given.checksum),
                *(None, None, None, 0.0),
            )
            if not dry_run:
                chosen = settings.model_copy(update={"parallelism": settings.parallelism or last})
                with hold_epoch_for_change(chosen, stream, warehouse, spark, options) as runner:
                    applied = _EditStep(EditOperator(edited, variable), frame.drop(_REFUSED), found)
                    completed = runner.change(applied.run, applied.record)
                found = replace(applied.result, checkpoint=completed.id, digest=completed.digest)
        except PySparkException as error:
            raise UsageError(
                f"{given.source} cannot be read: {explain(error)}", advice="correct it, and edit again"
            ) from error
        finally:
            frame.unpersist()
    if found.checkpoint is not None:
        proof = verify(settings, stream.name, at=str(found.checkpoint))
        failure = proof.failed[0].reason if proof.failed else None
        found = replace(found, proven=failure is None, failure=failure)
    return replace(found, seconds=round(time.perf_counter() - start, 3))


class _EditStep:
    """Runs the step that applies the rows, and reports what it did in `result`."""

    def __init__(self, editing: EditOperator, frame: DataFrame, planned: EditResult) -> None:
        self._editing, self._frame = editing, frame
        self.result = planned

    def run(self, spark: SparkSession, tasks: Mapping[str, StepTask]) -> StepRun:
        """Run the step: the edited operator gets the rows, the others get none."""
        name = self._editing.name
        task = replace(tasks[name], operator=self._editing, times={}, staged={}, hands_on=True)
        frame = step_frame(self._frame, task).persist()
        try:
            received = acknowledgements({name: frame}, {name: task})[name]
            totals = (
                output_rows(frame, received, task.operator)
                .agg(*(F.coalesce(F.sum(c), F.lit(0)).alias(c) for c in COUNTS.names))
                .first()
            )
        finally:
            frame.unpersist()
        assert totals is not None
        self.result = replace(self.result, **totals.asDict())
        others = run_step(spark, None, {other: task for other, task in tasks.items() if other != name})
        return StepRun({**others.received, name: received})

    def record(self, _: StepRun) -> dict[str, Any]:
        """Return the edit to record with the checkpoint."""
        done = self.result
        return {
            "edit": Edit(
                operator=done.operator,
                variable=done.variable,
                upserts=done.upserts,
                deletes=done.deletes,
                source=done.source,
                source_checksum=done.source_checksum,
                who=this_process(),
            )
        }


def _open_rows(rows: Path | DataFrame, schema: TableSchema, optional: Sequence[str]) -> _EditRows:
    """Check the columns, without reading a row.

    Raises:
        UsageError: the file does not exist or is not Parquet, or the columns do not fit.
    """
    if isinstance(rows, DataFrame):
        check_columns(arrow_schema(rows.schema), schema, "the DataFrame", optional)
        return _EditRows("a DataFrame", None, rows)
    path = rows.absolute()
    if not path.is_file():
        raise UsageError(f"{rows} is {'a directory' if path.is_dir() else 'not there'}: name a Parquet file")
    try:
        check_columns(pq.read_schema(path), schema, str(rows), optional)
        checksum = Checksum()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                checksum.update(piece)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{rows} cannot be read as a Parquet file: {str(error).splitlines()[0]}; name one") from None
    return _EditRows(str(path), checksum.text(), path)


def _check_frame(
    spark: SparkSession, given: _EditRows, schema: TableSchema, optional: Sequence[str], variable: Variable
) -> DataFrame:
    """Read the rows as changes of the table; a row of its own says why a part of them cannot be taken."""
    fields = [StructField(f.name, spark_type(f.type)) for f in schema.shown_changes]
    shape = StructType([*fields, StructField(_REFUSED, StringType())])
    cast = partial(cast_changes, schema=schema, what=given.source, optional=optional, variable=variable)
    check = partial(_check_tables, cast=cast, out=arrow_schema(shape))
    if isinstance(given.rows, DataFrame):
        return map_in_arrow(given.rows, lambda batches: check(_tables(batches)), shape)
    path, count = str(given.rows), pq.read_metadata(given.rows).num_row_groups
    pieces = spark.range(0, count, 1, max(1, min(count, 2 * cores(spark))))
    return pieces.mapInArrow(lambda ids: check(_row_groups(path, ids)), shape)


def _tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([batch]) for batch in batches)


def _row_groups(path: str, ids: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Read some row groups of a file in batches of rows."""
    with pq.ParquetFile(path) as file:
        for batch in ids:
            yield from _tables(file.iter_batches(_BATCH_ROWS, batch.column(0).to_pylist()))


def _check_tables(
    rows: Iterator[pa.Table], cast: Callable[[pa.Table], pa.Table], out: pa.Schema
) -> Iterator[pa.RecordBatch]:
    refused = None
    for table in rows:
        if refused is None:
            try:
                changes = cast(table).cast(pa.schema(list(out)[:-1]))
                yield from changes.append_column(_REFUSED, pa.nulls(len(changes), pa.string())).to_batches()
            except UsageError as error:
                refused = str(error)  # read on to the end: Spark does not reuse a worker that stops early
    if refused is not None:
        nulls = [pa.nulls(1, field.type) for field in list(out)[:-1]]
        yield pa.record_batch([*nulls, pa.array([refused])], schema=out)


def _check_rows(frame: DataFrame, schema: TableSchema, what: str) -> tuple[int, int]:
    """Check the changes; return the numbers of rows to put and to delete.

    Raises:
        UsageError: a row does not fit, there are no rows, or a key is repeated.
    """
    deleted = F.coalesce(F.sum(F.col(DELETED).cast("long")), F.lit(0))
    summary = frame.agg(F.max(_REFUSED), F.count("*"), deleted).first()
    assert summary is not None
    refused, count, deletes = summary
    if refused is not None:
        raise UsageError(refused)
    if not count:
        raise UsageError(f"{what} has no rows: add the rows to put or delete")
    keys = [F.col(f"`{name}`") for name in schema.primary_key.names]
    repeated = frame.groupBy(*keys).count().where("count > 1")
    summary = repeated.agg(F.count("*"), F.min(F.struct(*keys))).first()
    assert summary is not None
    if summary[0]:
        such = ", ".join(f"{name} {value}" for name, value in summary[1].asDict().items())
        raise UsageError(f"{what} has {summary[0]} keys more than once, such as {such}: name each once")
    return count - deletes, deletes
