"""Map Arrow types of state columns to Spark types, and names of columns to SQL."""

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

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


def is_for_python(kind: T.DataType) -> bool:
    """Whether a column of the type can be given to Python: no interval of years and months, and no struct with two
    fields of one name."""
    if isinstance(kind, T.StructType):
        return len(set(kind.names)) == len(kind.names) and all(is_for_python(field.dataType) for field in kind)
    if isinstance(kind, T.ArrayType):
        return is_for_python(kind.elementType)
    if isinstance(kind, T.MapType):
        return is_for_python(kind.keyType) and is_for_python(kind.valueType)
    return not isinstance(kind, T.YearMonthIntervalType)
