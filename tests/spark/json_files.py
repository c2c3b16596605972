"""A source of JSON files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession


def json_source(
    directory: Path, schema: str, *columns: str, at_once: int = 1
) -> Callable[[SparkSession, Mapping[str, str]], DataFrame]:
    """Make the source of a stream that reads the JSON files of a directory.

    Args:
        directory: it is created if it does not exist.
        schema: of the files' rows, as Spark's DDL.
        columns: SQL expressions that are selected of the rows; by default all columns.
        at_once: most files of a micro-batch.
    """
    directory.mkdir(exist_ok=True)

    def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", at_once).json(directory.as_uri())
        return rows.selectExpr(*(columns or ["*"]))

    return source
