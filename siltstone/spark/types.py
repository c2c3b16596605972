"""Which Spark type holds a column of state."""

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

_UNSIGNED = {
    pa.uint8(): T.ShortType(),
    pa.uint16(): T.IntegerType(),
    pa.uint32(): T.LongType(),
    pa.uint64(): T.DecimalType(20, 0),
}


def spark_type(kind: pa.DataType) -> T.DataType:
    """The Spark type for an Arrow type that a state table may have.

    The same as Spark gives a Parquet column of that type: an unsigned integer becomes the next wider signed type
    (uint64: decimal(20, 0)), a timestamp without zone TIMESTAMP_NTZ.
    """
    return _UNSIGNED.get(kind) or from_arrow_type(kind, prefer_timestamp_ntz=True)
