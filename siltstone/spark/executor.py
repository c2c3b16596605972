"""Runs independent pieces of work on Spark: a function over a list, one task a piece."""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from siltstone.errors import SiltstoneError

Piece = TypeVar("Piece")
Result = TypeVar("Result")
_ANSWERS = pa.schema([("piece", pa.int64()), ("answer", pa.binary())])


@cache
def freeze_imports() -> None:
    """Exempt what this worker process has imported from garbage collection; only its first call does anything.

    PySpark collects all garbage after each task. With pandas, pyarrow and Siltstone imported that takes 60 ms, more
    than most tasks of a micro-batch.
    """
    gc.collect()
    gc.freeze()


def spark_map(spark: SparkSession, function: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """`function` of every piece, in order, computed by Spark's tasks; `spark` may be of Spark Connect.

    All pieces travel together, so that what they share travels once.

    Raises:
        SiltstoneError: the first that a piece raised; trying again would not mend it, so it is not retried.
    """
    if not pieces:
        return []

    def guarded(piece: Piece) -> Result | SiltstoneError:
        try:
            return function(piece)
        except SiltstoneError as error:
            return error

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                answer = cloudpickle.dumps(guarded(pieces[number]))
                yield pa.RecordBatch.from_pylist([{"piece": number, "answer": answer}], _ANSWERS)
        freeze_imports()

    rows = spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(run, "piece long, answer binary").collect()
    answers = {row["piece"]: cloudpickle.loads(row["answer"]) for row in rows}
    results = [answers[number] for number in range(len(pieces))]
    for result in results:
        if isinstance(result, SiltstoneError):
            raise result
    return results
