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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructField, StructType

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.format.manifests import read_manifests
from siltstone.model import KeyGroupRange
from siltstone.restore.keys import parse_key_groups, parse_keys
from siltstone.restore.scan import ScanTask, Selection, TableShape, plan_scan, scan
from siltstone.settings import Settings, load_settings
from siltstone.spark.types import spark_type
from siltstone.spark.versions import arrow_schema
from siltstone.store.open import Warehouse
from siltstone.times import parse_time

REQUIRED = ("stream", "operator", "variable")
OPTIONS = (*REQUIRED, "warehouse", "catalog", "at", "as_of", "columns", "keys", "key_groups", "parallelism")


@dataclass(frozen=True, eq=False)
class StateSource:
    """The checked options of one `load()`: all that a reader needs.

    Attributes:
        catalog: its SQLAlchemy URL, None for the warehouse's own.
        columns: the columns to read.
        keys, key_groups, parallelism: None if not given.
    """

    warehouse: Warehouse
    catalog: str | None = field(repr=False)
    stream: str
    checkpoint: int
    shape: TableShape
    columns: pa.Schema
    keys: pa.Table | None
    key_groups: tuple[KeyGroupRange, ...] | None
    parallelism: int | None

    @classmethod
    def find(cls, options: Mapping[str, str]) -> "StateSource":
        """Check the options, and resolve the checkpoint.

        Raises:
            UsageError: an option is missing, unknown or not valid, or names something that does not exist.
            CorruptObject: the checkpoint's manifest is damaged.
            Unreachable: the store or the catalog cannot be reached or read.
        """
        for name in REQUIRED:
            if not options.get(name):
                raise UsageError(f'format("siltstone") needs the option {name!r}')
        for name in sorted(set(options) - set(OPTIONS)):
            raise UsageError(f'format("siltstone") has no option {name!r}: it has {", ".join(OPTIONS)}')
        if "at" in options and "as_of" in options:
            raise UsageError("the options at and as_of exclude each other: leave one out")
        settings = load_settings(warehouse=options.get("warehouse"), catalog=options.get("catalog"))
        stream, at, as_of = options["stream"], options.get("at", "latest"), options.get("as_of")
        with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
            catalog = place.catalog
            checkpoint = (
                catalog.checkpoints.as_of(stream, parse_time(as_of))
                if as_of
                else catalog.checkpoints.resolve(stream, at)
            )
            record = catalog.checkpoints.get(stream, checkpoint)
            [manifest] = read_manifests(place.warehouse.store, [record.manifest], stream).values()
        shape = TableShape.of(manifest, options["operator"], options["variable"])
        columns, keys, key_groups = (options.get(name) for name in ("columns", "keys", "key_groups"))
        return cls(
            warehouse=place.warehouse,
            catalog=settings.catalog,
            stream=stream,
            checkpoint=checkpoint,
            shape=shape,
            columns=shape.columns if columns is None else shape.select([c.strip() for c in columns.split(",")]),
            keys=None if keys is None else parse_keys(keys, shape.key),
            key_groups=None if key_groups is None else parse_key_groups(key_groups, manifest.max_parallelism),
            parallelism=_parse_positive(options.get("parallelism")),
        )

    @property
    def schema(self) -> StructType:
        """The columns to read, as a Spark schema."""
        return StructType([StructField(f.name, spark_type(f.type), f.nullable) for f in self.columns])


def _parse_positive(given: str | None) -> int | None:
    if given is not None and not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) > 0):
        raise UsageError(f"parallelism {given!r} is not a positive number: give one")
    return None if given is None else int(given)


class StatePartition(InputPartition):
    """One task of a scan."""

    value: ScanTask


class StateReader(DataSourceReader):
    """Plans the scan on the driver, and reads one part of it in each Spark task."""

    def __init__(self, source: StateSource, schema: StructType) -> None:
        self._source = source
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Plan the partitions, each of which reads a range of key groups.

        Raises:
            UsageError: the keys are in none of the selected key groups.
            StateError: the chain has a gap, or one of its manifests is damaged.
        """
        source = self._source
        selection = Selection(tuple(self._schema.names), source.key_groups, source.keys)
        with OpenWarehouse.open_existing(source.warehouse.url, source.catalog) as place:
            stored = place.catalog.chains.list_manifests(source.stream, source.checkpoint)
            manifests = read_manifests(place.warehouse.store, stored, source.stream)
        return [StatePartition(task) for task in plan_scan(manifests, source.shape, selection, source.parallelism)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one partition.

        Raises:
            CorruptObject, ProofFailed: stored state is damaged.
        """
        schema = arrow_schema(self._schema)
        warehouse = self._source.warehouse
        for rows in scan(warehouse.store, partition.value, warehouse.local.scratch()):
            yield from rows.cast(schema).to_batches()


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


def read_state(
    spark: SparkSession,
    settings: Settings,
    stream: str,
    operator: str,
    variable: str,
    at: str,
    as_of: str | None,
    columns: Sequence[str] | None,
) -> DataFrame:
    """Read one variable's table at a checkpoint as a DataFrame; the module's docstring describes the arguments."""
    register(spark)
    options = {"stream": stream, "operator": operator, "variable": variable, "warehouse": settings.warehouse}
    options |= {"at": at} if as_of is None else {"as_of": as_of}
    if settings.catalog is not None:
        options["catalog"] = settings.catalog
    if columns is not None:
        options["columns"] = ",".join(columns)
    return spark.read.format("siltstone").options(**options).load()
