"""Little streams for tests of what users see: the small stream over a few files, and a simple count that goes wrong.

They are found by name: tests of the command line run them with a `siltstone.toml` that names this module.
"""

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.settings import load_settings
from siltstone.stream import DIRECTORY, Stream
from tests.fault.small_stream import SCHEMA, SMALL, purchases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES = 6
_FIRST_MODIFIED_S = 1_577_836_800


def write_files(directory: Path, tables: Sequence[pa.Table]) -> None:
    """A Parquet file a table, which Spark takes in this order; those that are there stay."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables):
        path = directory / f"{number:05d}.parquet"
        if not path.exists():
            pq.write_table(table, path)
            os.utime(path, times=(_FIRST_MODIFIED_S + number, _FIRST_MODIFIED_S + number))


def read_files(spark: "SparkSession", directory: Path, schema: pa.Schema, at_once: int = 1) -> "DataFrame":
    """The files of a directory as a stream, so many a micro-batch."""
    from pyspark.sql.pandas.types import from_arrow_schema

    reader = spark.readStream.schema(from_arrow_schema(schema)).option("maxFilesPerTrigger", at_once)
    return reader.parquet(directory.absolute().as_uri())


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """The first purchases; the option `files` says how many files of them."""
    if not options["files"].isdigit():
        raise UsageError(f"files is {options['files']!r}: use a number")
    directory = Path(options[DIRECTORY])
    write_files(directory, purchases()[: int(options["files"])])
    return read_files(spark, directory, SCHEMA)


def arriving(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """The purchases of whatever files there are, two files a micro-batch; amounts depend on when Spark planned it."""
    from pyspark.sql import functions as F

    rows = read_files(spark, Path(options[DIRECTORY]), SCHEMA, at_once=2)
    return rows.withColumn("amount", F.expr("amount + unix_millis(current_timestamp()) % 1000"))


def source_of(tables: Sequence[pa.Table]) -> "FileSource":
    """A source of exactly these tables, a micro-batch each."""
    return FileSource(tuple(tables))


class FileSource:
    """See `source_of`."""

    def __init__(self, tables: tuple[pa.Table, ...]) -> None:
        self.tables = tables

    def __call__(self, spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
        """Write what is missing, read it as a stream."""
        directory = Path(options[DIRECTORY])
        write_files(directory, self.tables)
        return read_files(spark, directory, self.tables[0].schema)


class Counts(Operator):
    """How many rows every key has had, and their sum: the simplest state there is."""

    name = "counts"
    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("value",)
    totals = ValueState(value={"rows": pa.int64(), "sum": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count and add."""
        state.totals.put(rows.keys, _added(rows, state.totals.get(rows.keys)))
        return None


class Grown(Counts):
    """`Counts` with one more nullable column and one more variable."""

    totals = ValueState(value={"rows": pa.int64(), "sum": pa.int64(), "seen": pa.bool_()})
    recent = ValueState(value={"most": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count and add; note the highest value of the call."""
        added = _added(rows, state.totals.get(rows.keys))
        state.totals.put(rows.keys, {**added, "seen": np.ones(len(rows.keys), bool)})
        most = np.zeros(len(rows.keys), np.int64)
        np.maximum.at(most, rows.key_index, rows.table.column("value").to_numpy())
        state.recent.put(rows.keys, {"most": most})
        return None


def _added(rows: Rows, old: pa.Table) -> dict[str, np.ndarray]:
    totals = {name: np.array(old.column(name).fill_null(0).to_numpy()) for name in ("rows", "sum")}
    np.add.at(totals["rows"], rows.key_index, 1)
    np.add.at(totals["sum"], rows.key_index, rows.table.column("value").to_numpy())
    return totals


class Breaking(Counts):
    """Does not like negative values."""

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count, then raise."""
        super().process(rows, state)
        if any(value < 0 for value in rows.table.column("value").to_pylist()):
            raise ZeroDivisionError("a value is negative")
        return None


class Noticing(Counts):
    """Keeps what the catalog said at each `region_checkpointed`."""

    seen: ClassVar[list[tuple[int, int]]] = []
    """(the id it was told, the newest in the catalog)"""

    def region_checkpointed(self, checkpoint: int) -> None:
        """Look the checkpoint up."""
        with OpenWarehouse.open_existing(load_settings().warehouse) as place:
            self.seen.append((checkpoint, place.catalog.checkpoints.last_id("noticing")))


class Overtaken(Counts):
    """Another writer takes its stream over at its second checkpoint."""

    def region_checkpointed(self, checkpoint: int) -> None:
        """Be that other writer."""
        if checkpoint == 2:
            with OpenWarehouse.open_existing(load_settings().warehouse) as place:
                place.catalog.runs.begin("overtaken", "another")


class Filling(Counts):
    """From its second checkpoint on, no file of this process may be longer than a few bytes."""

    def region_checkpointed(self, checkpoint: int) -> None:
        """Fill the disk, in a way."""
        if checkpoint == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Flaky(Counts):
    """Fails once at each of two steps, after it has changed state: once by an exception, once by dying."""

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count, then fail, if it is time and no task has."""
        super().process(rows, state)
        largest = max(rows.table.column("value").to_pylist())
        if largest == RAISE and _first("raised"):
            raise ZeroDivisionError("once")
        if largest == DIE and _first("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return None


def _first(what: str) -> bool:
    """Whether nobody has asked before, in any process."""
    try:
        (Path(os.environ["FLAKY"]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def keyed(keys: Sequence[object], values: Sequence[int]) -> pa.Table:
    """Rows for `Counts`."""
    return pa.table({"key": pa.array(keys, pa.int64()), "value": pa.array(values, pa.int64())})


RAISE, DIE = 1001, 1002
STEPS = [
    keyed([1, 2, 3], [3, 4, 5]),
    keyed([1, 2, 4, 4], [5, 6, 7, RAISE]),
    keyed([1, 9], [8, DIE]),
    keyed([2, 9, 9], [1, 2, 3]),
]
LITTLE = replace(SMALL, name="little", source=source, options={"files": str(FILES)})
UNEVEN = replace(SMALL, name="uneven", source=arriving)
COUNTS = Stream("counts", source_of(STEPS), [Counts()], max_parallelism=8)
FLAKY = replace(COUNTS, name="flaky", operators=[Flaky()])
NOTICING = replace(COUNTS, name="noticing", operators=[Noticing()])
FILLING = replace(COUNTS, name="filling", operators=[Filling()])
OVERTAKEN = replace(COUNTS, name="overtaken", operators=[Overtaken()])
BREAKING = replace(
    COUNTS, name="breaking", source=source_of([STEPS[0], keyed([1, 2], [5, -6])]), operators=[Breaking()]
)
NULLS = replace(COUNTS, name="nulls", source=source_of([STEPS[0], keyed([1, None], [5, 6])]))
