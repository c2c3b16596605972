"""What is recorded of one stream: read it, and change nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from siltstone.errors import UsageError
from siltstone.listings import CheckpointDetails, CheckpointList, DeletionList, OutputList, Report, SavepointList
from siltstone.model import LATEST, check_name
from siltstone.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from siltstone.catalog.warehouse import OpenWarehouse


class StreamView:
    """The methods of `StreamClient` that show what is recorded of a stream. They change nothing."""

    def __init__(self, settings: Settings, stream: str) -> None:
        self.settings: Settings = settings
        self.name: str = check_name("stream", stream)

    def checkpoints(self, limit: int | None = None) -> CheckpointList:
        """List the completed checkpoints of the stream, and whether materialization keeps up.

        Args:
            limit: list only this number of the newest; None for all.
        """
        from siltstone.chains import inspect
        from siltstone.chains.due import materialization_health

        settings = self.settings
        with self._open() as warehouse:
            found = inspect.list_checkpoints(warehouse.catalog, self.name, limit)
            origin = inspect.describe_origin(warehouse.catalog, self.name)
            health = materialization_health(
                warehouse.catalog, self.name, settings.materialization, settings.policy_options
            )
        listed = inspect.list_materialization(health)
        return CheckpointList(self.name, **origin, checkpoints=found, materialization=listed)

    def show(self, at: str = LATEST) -> CheckpointDetails:
        """Show one checkpoint: its handles, digests and chain.

        Raises:
            CorruptObject: its manifest is damaged.
        """
        from siltstone.chains import inspect

        with self._open() as warehouse:
            return CheckpointDetails(
                inspect.show_checkpoint(warehouse.catalog, warehouse.warehouse.store, self.name, at)
            )

    @overload
    def table(
        self,
        operator: str,
        variable: str,
        *,
        at: str = LATEST,
        as_of: str | None = None,
        columns: Sequence[str] | None = None,
        limit_bytes: int | None = None,
        spark: None = None,
    ) -> "ds.Dataset": ...

    @overload
    def table(
        self,
        operator: str,
        variable: str,
        *,
        at: str = LATEST,
        as_of: str | None = None,
        columns: Sequence[str] | None = None,
        limit_bytes: int | None = None,
        spark: "SparkSession",
    ) -> "DataFrame": ...

    def table(
        self,
        operator: str,
        variable: str,
        *,
        at: str = LATEST,
        as_of: str | None = None,
        columns: Sequence[str] | None = None,
        limit_bytes: int | None = None,
        spark: "SparkSession | None" = None,
    ) -> "ds.Dataset | DataFrame":
        """Read one variable's table at a checkpoint: as an Arrow dataset, or with `spark` as a DataFrame.

        Args:
            variable: a variable or one of its tables, such as `window.bounds`.
            as_of: an event time (ISO 8601), instead of `at`: the newest checkpoint without a later event.
            columns: names of the columns to read; None for all.
            limit_bytes: most bytes of memory for the dataset, 1 GiB by default; ignored with `spark`.
            spark: a session whose tasks read the table.

        Raises:
            UsageError: the operator, variable or column does not exist, or the table is too large without Spark.
            CorruptObject, ProofFailed: stored state is damaged.
        """
        if as_of is not None and at != LATEST:
            raise UsageError("at and as_of exclude each other: leave one out")
        if spark is not None:
            from siltstone.spark.state_scan import read_state

            return read_state(spark, self.settings, self.name, operator, variable, at, as_of, columns)
        from siltstone.format.manifests import read_manifests
        from siltstone.restore.table import LIMIT_BYTES, read_table
        from siltstone.retention.leases import hold_lease
        from siltstone.times import parse_time

        with self._open() as warehouse:
            found = warehouse.catalog.checkpoints
            checkpoint = found.as_of(self.name, parse_time(as_of)) if as_of else found.resolve(self.name, at)
            with hold_lease(warehouse.catalog, self.name, [checkpoint], what="reads"):
                store = warehouse.warehouse.store
                manifests = read_manifests(
                    store, warehouse.catalog.chains.list_manifests(self.name, checkpoint), self.name
                )
                scratch = warehouse.warehouse.local.scratch()
                return read_table(store, manifests, operator, variable, columns, limit_bytes or LIMIT_BYTES, scratch)

    def report(self, picture: Path) -> Report:
        """Draw the chain of the stream: bytes by form, restore costs, D, bounds, timeline.

        Args:
            picture: a .png, .svg or .pdf file.

        Raises:
            UsageError: the file has another suffix, or its directory does not exist.
        """
        from siltstone.report import check_picture_path, draw_report, report_data

        check_picture_path(picture)
        settings = self.settings
        with self._open() as warehouse:
            data = report_data(warehouse.catalog, self.name, settings.materialization, settings.policy_options)
        draw_report(data, picture)
        return Report(data, str(picture))

    def savepoints(self) -> SavepointList:
        """List the savepoints of the stream, including expired ones."""
        from siltstone.retention.savepoints import list_savepoints

        with self._open() as warehouse:
            return SavepointList(self.name, list_savepoints(warehouse.catalog, self.name))

    def deletions(self, limit: int | None = None) -> DeletionList:
        """List what was deleted from the stream in the last 90 days, and by whom.

        Each entry is one pass of retention, of a deletion, of a sweep, or of pruning the input log or run records. Its
        rows are rows of the catalog. `siltstone doctor` reports unfinished deletions.

        Args:
            limit: list only this number of the newest; None for all.
        """
        from siltstone.chains.inspect import list_deletions

        with self._open() as warehouse:
            return DeletionList(self.name, list_deletions(warehouse.catalog, self.name, limit))

    def outputs(self) -> OutputList:
        """List what sinks were given, and up to which checkpoint all have it.

        Sinks get an output each, one after the other. A reader of several of them sees one state of the stream if it
        reads of each only what is of checkpoints up to `consistent`.
        """
        from siltstone.client.outputs import list_outputs

        with self._open() as warehouse:
            return list_outputs(warehouse.catalog, self.name)

    def read_output(self, output: str, checkpoint: int) -> "pa.Table":
        """Read what a sink was given, or is to be given, for a checkpoint.

        It is there until the sink has it, and for `retention.outputs` after that.

        Args:
            output: an operator's name, `OPERATOR-OUTPUT` for a side output, or "dead_letters".

        Raises:
            UsageError: nothing is kept of it, or it has become files of a Delta table.
            CorruptObject: it is damaged.
        """
        from siltstone.client.outputs import read_rows

        with self._open() as warehouse:
            return read_rows(warehouse.catalog, warehouse.warehouse.store, self.name, output, checkpoint)

    def sink_table(self, operator: str) -> "DeltaTable":
        """Open the Delta table of an operator's sink, to read it: `to_pandas`, `to_pyarrow_dataset`, `file_uris`.

        Args:
            operator: an operator, or "dead_letters".

        Raises:
            UsageError: the sink has no table: nothing was delivered to it yet, or it is of another kind.
        """
        from siltstone.sinks.delta import SinkTable
        from siltstone.store.table_place import find_table_obstacle

        with self._open() as warehouse:
            warehouse.catalog.streams.get(self.name)
            store = warehouse.warehouse.store
            table = None if find_table_obstacle(store) else SinkTable(store, self.name, operator).open()
            if table is None:
                raise UsageError(
                    f"stream {self.name} has no table of {operator}: run it first, or read the rows where its sink "
                    "writes them (a ParquetSink: sink/STREAM/OPERATOR in the warehouse)"
                )
            return table

    def _open(self) -> "OpenWarehouse":
        """Open the warehouse and its catalog, for one call."""
        from siltstone.catalog.warehouse import OpenWarehouse

        return OpenWarehouse.open_existing(self.settings.warehouse, self.settings.catalog)
