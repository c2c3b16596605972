"""A source of JSON files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession


def json_source(
    directory: Path, schema: str, *columns: str, at_once: int = 1
) -> Callable[[SparkSession, Mapping[str, str]], DataFrame]:
    """The files of a directory, which is made, so many a micro-batch, and what these expressions make of their rows."""
    directory.mkdir(exist_ok=True)

    def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", at_once).json(directory.as_uri())
        return rows.selectExpr(*(columns or ["*"]))

    return source
