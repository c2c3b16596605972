"""Runs independent pieces of work on Spark: a function over a list, one task a piece."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pyspark.sql import SparkSession

from siltstone.errors import SiltstoneError

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def spark_map(spark: SparkSession, function: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """`function` of every piece, in order, computed by Spark's tasks.

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

    results = spark.sparkContext.parallelize(pieces, len(pieces)).map(guarded).collect()
    for result in results:
        if isinstance(result, SiltstoneError):
            raise result
    return results  # pyright: ignore[reportReturnType]
