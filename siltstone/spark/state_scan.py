"""Read recorded state on Spark: check what is asked for, plan a scan on the driver, read a part of it in each task.

`StreamClient.table` and `format("siltstone")` do so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.format.manifests import read_manifests
from siltstone.model import KeyGroupRange
from siltstone.restore.keys import parse_key_groups, parse_keys
from siltstone.restore.scan import ScanTask, Selection, TableShape, plan_scan, scan
from siltstone.settings import Settings, load_settings
from siltstone.spark.executor import frame_of_pieces
from siltstone.spark.types import spark_type
from siltstone.spark.versions import arrow_schema
from siltstone.store.open import Warehouse
from siltstone.times import parse_time

REQUIRED = ("stream", "operator", "variable")
OPTIONS = (*REQUIRED, "warehouse", "catalog", "at", "as_of", "columns", "keys", "key_groups", "parallelism")


@dataclass(frozen=True, eq=False)
class StateSource:
    """What is asked for, checked: the options of `format("siltstone")`, and the checkpoint that they name.

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

    def plan(self, columns: Sequence[str]) -> list[ScanTask]:
        """Plan the tasks that read these columns: at least one, each of some key groups.

        Raises:
            UsageError: the keys are in none of the selected key groups.
            StateError: the chain has a gap, or one of its manifests is damaged.
        """
        selection = Selection(tuple(columns), self.key_groups, self.keys)
        with OpenWarehouse.open_existing(self.warehouse.url, self.catalog) as place:
            stored = place.catalog.chains.list_manifests(self.stream, self.checkpoint)
            manifests = read_manifests(place.warehouse.store, stored, self.stream)
        return plan_scan(manifests, self.shape, selection, self.parallelism)

    def read(self, task: ScanTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task, as Spark takes them.

        Raises:
            CorruptObject, ProofFailed: stored state is damaged.
        """
        for rows in scan(self.warehouse.store, task, self.warehouse.local.scratch()):
            yield from rows.cast(schema).to_batches()


def _parse_positive(given: str | None) -> int | None:
    if given is not None and not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) > 0):
        raise UsageError(f"parallelism {given!r} is not a positive number: give one")
    return None if given is None else int(given)


def scan_frame(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """Read what the options of `siltstone.spark.datasource` name as a DataFrame, whose tasks are planned now.

    Raises:
        UsageError: an option is not valid, or something that it names does not exist.
        CorruptObject, StateError: a manifest is damaged. Damaged state fails the DataFrame's tasks.
    """
    source = StateSource.find(options)
    tasks, schema = source.plan(source.schema.names), arrow_schema(source.schema)

    return frame_of_pieces(spark, lambda number: source.read(tasks[number], schema), len(tasks), source.schema)


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
    """Read one variable's table at a checkpoint as a DataFrame; see `scan_frame`."""
    options = {"stream": stream, "operator": operator, "variable": variable, "warehouse": settings.warehouse}
    options |= {"at": at} if as_of is None else {"as_of": as_of}
    if settings.catalog is not None:
        options["catalog"] = settings.catalog
    if columns is not None:
        options["columns"] = ",".join(columns)
    return scan_frame(spark, options)
