"""Map Arrow types of state columns to Spark types, and names of columns to SQL."""

from functools import cache

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from siltstone.spark.versions import arrow_schema

_UNSIGNED = {
    pa.uint8(): T.ShortType(),
    pa.uint16(): T.IntegerType(),
    pa.uint32(): T.LongType(),
    pa.uint64(): T.DecimalType(20, 0),
}


def quote(name: str) -> str:
    """Quote a column's name for Spark's SQL; it may contain dots or spaces."""
    return "`" + name.replace("`", "``") + "`"


def spark_type(kind: pa.DataType) -> T.DataType:
    """Return the Spark type of an Arrow type that a state table may have.

    It is the type that Spark gives a Parquet column: an unsigned integer becomes the next wider signed type (uint64:
    decimal(20, 0)), a timestamp without zone becomes TIMESTAMP_NTZ.
    """
    if pa.types.is_struct(kind):
        return T.StructType([T.StructField(field.name, spark_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return T.ArrayType(spark_type(kind.value_type))
    return _UNSIGNED.get(kind) or from_arrow_type(kind, prefer_timestamp_ntz=True)


@cache
def has_arrow_type(kind: T.DataType) -> bool:
    """Whether a column of the type can be given to Python; an interval of years and months cannot."""
    try:
        arrow_schema(T.StructType([T.StructField("column", kind)]))
    except PySparkTypeError:
        return False
    return True
