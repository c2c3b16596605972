"""Read or map pieces on Spark, one task per piece."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from siltstone.errors import SiltstoneError
from siltstone.spark.masters import is_local
from siltstone.store.identity import check_on_this_machine
from siltstone.store.open import Warehouse

Piece = TypeVar("Piece")
Result = TypeVar("Result")
_ANSWERS = pa.schema([("piece", pa.int64()), ("answer", pa.binary())])


@cache
def freeze_imports() -> None:
    """Exempt the imported modules of this worker process from garbage collection. Only the first call has an effect.

    PySpark collects all garbage after each task. With pandas, pyarrow and Siltstone imported, that takes 60 ms: longer
    than most tasks of a micro-batch.
    """
    gc.collect()
    gc.freeze()


def map_in_arrow(
    rows: DataFrame,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType,
) -> DataFrame:
    """Call `DataFrame.mapInArrow`, which takes a dot in a column's name for a field, and refuses a backtick."""
    names = rows.columns
    if not any(character in name for name in names for character in ".`"):
        return rows.mapInArrow(function, schema)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from function(batch.rename_columns(names) for batch in batches)

    return rows.toDF(*(f"c{place}" for place in range(len(names)))).mapInArrow(run, schema)


def frame_of_pieces(
    spark: SparkSession, read: Callable[[int], Iterable[pa.RecordBatch]], count: int, schema: StructType | str
) -> DataFrame:
    """Make a DataFrame whose tasks return the rows of one piece each.

    Args:
        read: piece, from 0 on -> its rows.
        count: the number of pieces.
        schema: of the rows.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read(number)

    return spark.range(0, count, 1, count).mapInArrow(run, schema)


def spark_map(
    spark: SparkSession, function: Callable[[Piece], Result], pieces: Sequence[Piece], *, on: Warehouse | None = None
) -> list[Result]:
    """Call `function` for every piece in Spark's tasks, and return the results in order.

    All pieces are sent together, so that objects they share are sent once.

    Args:
        spark: a classic or Spark Connect session.
        on: a warehouse that each machine must have.

    Raises:
        SiltstoneError: the first error of a piece. It is not retried, because it would fail again.
    """
    if not pieces:
        return []
    if isinstance(spark, SparkSession) and is_local(spark.sparkContext.master):
        on = None

    def call(piece: Piece) -> Result | SiltstoneError:
        try:
            if on is not None:
                check_on_this_machine(on)
            return function(piece)
        except SiltstoneError as error:
            return error

    def answer(number: int) -> Iterator[pa.RecordBatch]:
        said = cloudpickle.dumps(call(pieces[number]))
        yield pa.RecordBatch.from_pylist([{"piece": number, "answer": said}], _ANSWERS)
        freeze_imports()

    rows = frame_of_pieces(spark, answer, len(pieces), "piece long, answer binary").collect()
    answers = {row["piece"]: cloudpickle.loads(row["answer"]) for row in rows}
    results = [answers[number] for number in range(len(pieces))]
    for result in results:
        if isinstance(result, SiltstoneError):
            raise result
    return results
