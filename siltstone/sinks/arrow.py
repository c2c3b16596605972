"""A sink of the user's own that takes rows as Arrow, without a Spark job."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.format.output import open_output, read_again, staged_schema
from siltstone.store.base import Store

if TYPE_CHECKING:
    from siltstone.catalog.records.outbox import OutputRecord


@dataclass(frozen=True)
class ArrowSink:
    """A function that gets an operator's output as Arrow: the driver reads what was staged, and Spark runs no job.

    A function `(rows, checkpoint)` by itself gets a Spark DataFrame, and takes a job to read it. With few rows that
    job takes longer than all else in a delivery; with very many, the tasks of a DataFrame share the work.

        def keep(rows, checkpoint):
            pq.write_table(rows.read_all(), f"{checkpoint}.parquet")  # the same id again makes the same file

        sinks={"spenders": st.ArrowSink(keep)}

    Like any sink of your own, it may get a checkpoint's rows again under the same id after a crash: skip ids you have.

    Args:
        function: called on the driver with a `pyarrow.RecordBatchReader` and the id of the checkpoint;
            `rows.read_all()` is a table. Of rows read one batch after the other, memory holds the last batch and one
            staged object, about 16 MiB as it is stored. It returns once the rows are durable. The reader is of no use
            after that.

    Raises:
        UsageError: `function` cannot be called.
    """

    function: Callable[[pa.RecordBatchReader, int], object]
    stages_table: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(
                f"an ArrowSink has a {type(self.function).__name__}: give it a function (rows, checkpoint), which gets "
                "a pyarrow.RecordBatchReader and a number"
            )


def open_rows(store: Store, output: "OutputRecord") -> pa.RecordBatchReader:
    """Open the rows of an output for reading, object by object; each is verified before its first row is returned.

    Reading raises `CorruptObject` if an object is missing, cut or altered, in two reads, and `Unreachable` if the store
    does not answer. Where another library reads, it may raise an error of its own instead.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for stored in output.objects:
            yield from read_again(lambda stored=stored: open_output(store, stored, output.arrow_schema))

    return pa.RecordBatchReader.from_batches(staged_schema(output.arrow_schema), batches())
