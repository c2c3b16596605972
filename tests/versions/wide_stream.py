"""A stream with keys, state and output of every type, to be run in turn under several versions of Spark.

    source -> by_c0, by_c1, ...   an aggregate for each type of key, nulls and odd values among the keys
           -> wide                state and output of every type, flat and nested
           -> numbers             keys that are cast from text; text that is not a number becomes a dead letter

Its source is a directory of Parquet files that it makes itself, the same on every machine, a micro-batch a file.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.aggregates.operator import Aggregate, Count, Max, Sum
from siltstone.operator import ListState, Operator, Rows, State, ValueState
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import DIRECTORY, Stream
from tests.arrow_frames import to_arrow
from tests.arrow_strategies import TYPES, UNSIGNED, random_array
from tests.spark_streams import write_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECEIVED = Path("received")
"""where a sink that is a function writes what it gets, in the working directory of the run"""
FILES, ROWS = 6, 120
_TIME = pa.timestamp("us", tz="UTC")
_NESTED = pa.list_(pa.struct([("name", pa.string()), ("at", _TIME), ("local", pa.timestamp("us"))]))
KEYS = {f"c{i}": kind for i, kind in enumerate(TYPES)}
VALUES = {name: kind for name, kind in KEYS.items() if kind not in UNSIGNED} | {"nested": _NESTED}
_SUMS = [Count("rows"), Sum("total", of="n"), Max("last", of="at", type=_TIME)]
SCHEMA = pa.schema(
    [("n", pa.int64()), ("at", _TIME), ("text", pa.string()), *KEYS.items(), pa.field("nested", _NESTED)]
)


class Wide(Operator):
    """Keep the newest row of each key, and all times of it."""

    name = "wide"
    key = pa.schema([("id", pa.int64())])
    inputs = ("at", *VALUES)
    output = pa.schema([("id", pa.int64()), ("at", _TIME), *VALUES.items()])
    newest = ValueState(value=VALUES)
    times = ListState(value={"at": _TIME})

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Keep rows, and return them."""
        state.newest.put(rows.keys, {name: rows.last(name) for name in VALUES})
        state.times.append(rows.keys, rows.key_index, rows.table.select(["at"]))
        return rows.table.select(self.output.names)


def table(number: int) -> pa.Table:
    """The rows of one file."""
    random = Random(number)
    starts = [1_372_636_800_000_000 + random.randrange(10**12) for _ in range(ROWS)]
    at = pa.array(starts, pa.int64()).cast(_TIME)
    nested = [
        [{"name": f"ä {n}", "at": at[n].as_py(), "local": at[n].as_py().replace(tzinfo=None)}] * random.randrange(3)
        for n in range(ROWS)
    ]
    columns: dict[str, Any] = {
        "n": pa.array(range(ROWS), pa.int64()),
        "at": at,
        "text": pa.array([random.choice(["7", " 8 ", "-3", "x", "1.5", "9223372036854775808", ""]) for _ in starts]),
        **{name: _few(random, kind) for name, kind in KEYS.items()},
        "nested": pa.array(nested, _NESTED),
    }
    return pa.table(columns, SCHEMA)


def _few(random: Random, kind: pa.DataType) -> pa.Array:
    """Values that repeat, so that keys have several rows."""
    few = random_array(Random(str(kind)), kind, 24)
    return few.take(pa.array([random.randrange(len(few)) for _ in range(ROWS)]))


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """The files, with an identifier of few values."""
    from siltstone.spark.types import spark_type

    directory = Path(options[DIRECTORY])
    write_files(directory, [table(number) for number in range(FILES)])
    reader = spark.readStream.schema(_spark_schema(spark_type)).option("maxFilesPerTrigger", 1)
    return reader.parquet(directory.absolute().as_uri()).selectExpr("*", "n % 17 as id")


def _spark_schema(spark_type: Any) -> Any:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, spark_type(field.type)) for field in SCHEMA])


def receive(rows: "DataFrame", checkpoint: int) -> None:
    """Write what a sink gets, once per checkpoint."""
    RECEIVED.mkdir(exist_ok=True)
    pq.write_table(to_arrow(rows), RECEIVED / f"{checkpoint}.parquet")


STREAM = Stream(
    "wide",
    source,
    [
        *(Aggregate(f"by_{name}", {name: kind}, _SUMS, output=kind not in UNSIGNED) for name, kind in KEYS.items()),
        Wide(),
        Aggregate("numbers", {"text": pa.int64()}, [Count("rows")], nullable=()),
    ],
    sinks={
        "wide": None,
        "numbers": receive,
        **{f"by_{name}": ParquetSink() for name, kind in KEYS.items() if kind not in UNSIGNED},
    },
    event_time="at",
    on_bad_row="dead-letter",
    max_parallelism=8,
)
