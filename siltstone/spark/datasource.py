"""Read recorded state as a DataFrame: `spark.read.format("siltstone")`, a Python data source.

    spark.read.format("siltstone").options(stream="flights", operator="aircraft", variable="totals").load()

    warehouse, catalog    URLs; by default those of the settings
    stream, operator      names; required
    variable              a variable or one of its tables, such as `window.bounds`; required
    at                    checkpoint id, commit time or latest (default)
    as_of                 event time, instead of `at`: the newest checkpoint with no later event
    columns               comma-separated names of the columns to read
    keys                  JSON list of operator keys, `[{"tailnum": "N14228"}]`: only their rows
    key_groups            `FIRST-LAST`: only these key groups
    parallelism           number of tasks; by default as many as wrote the checkpoint, more if it is large

`load()` resolves the checkpoint; the DataFrame shows that checkpoint however often it is computed. An opaque variable
has the columns `key_group` and `value` (binary). Columns and keys are options because Spark 4.3 does not tell a Python
data source which columns a query needs. It also reuses the partitions of one query's pushed filters for every later
query of the same DataFrame, so that `DataSourceReader.pushFilters` would silently lose rows. Spark applies all filters.
"""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from siltstone.errors import UsageError
from siltstone.restore.scan import ScanTask
from siltstone.spark.state_scan import StateSource
from siltstone.spark.versions import arrow_schema

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
except ModuleNotFoundError:
    raise UsageError(
        'format("siltstone") needs Spark 4.0 or newer, which has data sources in Python: read state with '
        "siltstone.open(...).stream(...).table(..., spark=spark), which any version can"
    ) from None


class StatePartition(InputPartition):
    """One task of a scan."""

    value: ScanTask


class StateReader(DataSourceReader):
    """Plans the scan on the driver, and reads one part of it in each Spark task."""

    def __init__(self, source: StateSource, schema: StructType) -> None:
        self._source = source
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Plan the partitions; see `StateSource.plan`."""
        return [StatePartition(task) for task in self._source.plan(self._schema.names)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one partition; see `StateSource.read`."""
        return self._source.read(partition.value, arrow_schema(self._schema))


class StateDataSource(DataSource):
    """The format `siltstone`. The module's docstring lists its options."""

    _source: StateSource | None = None
    """found by the first call of `schema` or `reader`"""

    @classmethod
    def name(cls) -> str:
        return "siltstone"

    def schema(self) -> StructType:
        """Return the schema of the selected columns of the table.

        Raises:
            SiltstoneError: see `StateSource.find`; Spark shows it as the last line of an AnalysisException.
        """
        return self._get_source().schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of the columns of `schema`, which the user may have given.

        Raises:
            UsageError: the table has no column of a name and type in `schema`.
        """
        source = self._get_source()
        own = {column.name: column.dataType for column in source.schema}
        for column in schema:
            if own.get(column.name) != column.dataType:
                known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in own.items())
                wanted = f"{column.name} {column.dataType.simpleString()}"
                raise UsageError(f"{source.shape.name} has no column {wanted}: it has {known}")
        return StateReader(source, schema)

    def _get_source(self) -> StateSource:
        if self._source is None:
            self._source = StateSource.find(dict(self.options))
        return self._source


def register(spark: SparkSession) -> None:
    """Register the format `siltstone` with a session; `spark_session` does so for sessions it makes."""
    spark.dataSource.register(StateDataSource)
