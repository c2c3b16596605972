"""Materialize a stream's chains, delete what it no longer needs, and protect checkpoints by savepoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from siltstone.client.opening import ignore, open_warehouse
from siltstone.errors import UsageError
from siltstone.listings import (
    DeletionList,
    Retention,
    Savepoint,
    SavepointDropped,
    SavepointList,
)
from siltstone.model import LATEST, check_name
from siltstone.settings import Settings

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from siltstone.change.export_savepoint import SavepointExport
    from siltstone.retention.deletion import DeletionResult
    from siltstone.retention.sweep import SweepResult
    from siltstone.retention.truncate import Truncation
    from siltstone.sinks.maintenance import SinkMaintenance
    from siltstone.spark.operations import (
        MaterializeResult,
    )
    from siltstone.stream import Stream


class StreamStorage:
    """The methods of `StreamClient` that keep chains short and stores clean."""

    def __init__(self, settings: Settings, stream: "str | Stream") -> None:
        self.settings: Settings = settings
        self.name: str = stream if isinstance(stream, str) else stream.name
        check_name("stream", self.name)

    def materialize(
        self,
        *,
        at: str = LATEST,
        operators: Sequence[str] = (),
        due: bool = False,
        on_operator: Callable[[str], None] = ignore,
    ) -> "MaterializeResult":
        """Consolidate a checkpoint's chains into new bases. The stream may run meanwhile.

        Args:
            operators: names of the operators; empty for all.
            due: only those of them that are due by the settings.
            on_operator: called with each operator's name before it is materialized.
        """
        if due and at != LATEST:
            raise UsageError("due and at exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.materialize(
            self.settings, self.name, at=at, operators=operators, due=due, on_operator=on_operator
        )

    def truncate(self, *, dry_run: bool = False) -> "Truncation":
        """Delete the checkpoints that retention does not keep, and the objects that only they need.

        The rules are those of the settings (`siltstone.open(..., retention={"keep_last": 10})`), or else those recorded
        with the stream.

        Args:
            dry_run: only report what would be deleted.
        """
        from siltstone.retention.truncate import truncate

        with open_warehouse(self.settings) as warehouse:
            return truncate(warehouse, self.name, self.settings.retention, dry_run=dry_run)

    def retention(self, rules: Mapping[str, Any] | None = None) -> Retention:
        """Return the rules of what the stream keeps; with `rules`, replace those recorded with it first.

        Args:
            rules: such as `{"keep_last": 500, "keep_daily": 7}` or `{"keep_all": True}`; None changes nothing.
        """
        from siltstone.catalog.extract_writer import try_write_extract
        from siltstone.retention.retention_rules import RetentionOptions
        from siltstone.retention.truncate import describe_retention

        with open_warehouse(self.settings) as warehouse:
            if rules:
                warehouse.catalog.streams.set_retention(self.name, RetentionOptions.model_validate(rules).to_record())
                try_write_extract(warehouse, self.name)
            found = describe_retention(warehouse.catalog, self.name, self.settings.retention)
        return Retention(self.name, found["recorded"], found["in_force"], found["from"], found["described"])

    def delete(self, checkpoints: Sequence[int]) -> "DeletionResult":
        """Delete checkpoints. One that others build on is only marked, and deleted with the last of them.

        Raises:
            UsageError: one of them has a savepoint or is the newest; nothing is deleted.
        """
        from siltstone.retention.deletion import delete_checkpoints
        from siltstone.retention.retention_rules import retention_in_force

        with open_warehouse(self.settings) as warehouse:
            rules = retention_in_force(warehouse.catalog.streams.get(self.name).retention, self.settings.retention)
            return delete_checkpoints(warehouse, self.name, checkpoints, input_log=rules.input_log)

    def deletions(self, limit: int | None = None) -> DeletionList:
        """List what was deleted from the stream in the last 90 days, and by whom."""
        from siltstone.chains.inspect import list_deletions

        with open_warehouse(self.settings) as warehouse:
            return DeletionList(self.name, list_deletions(warehouse.catalog, self.name, limit))

    def sweep(
        self,
        *,
        dry_run: bool = False,
        limit: int | None = None,
        incomplete: bool = False,
        age_guard: str = "3d",
        who: str | None = None,
    ) -> "SweepResult":
        """Delete stored objects that nothing refers to, such as those of killed runs and of repeated attempts.

        Args:
            dry_run: only report what would be deleted and why.
            limit: most objects to delete; None for all.
            incomplete: search only entries of checkpoints that did not complete.
            age_guard: keep younger objects that a run may still be writing: 12h, 3d or 1w.
            who: recorded with each deletion; None for this process.
        """
        from siltstone.retention.retention_rules import parse_duration
        from siltstone.retention.sweep import SweepOptions, sweep

        options = SweepOptions(limit, dry_run, incomplete, parse_duration(age_guard))
        with open_warehouse(self.settings) as warehouse:
            return sweep(warehouse, self.name, options, who)

    # Sinks

    def sink_table(self, operator: str) -> "DeltaTable":
        """Open the Delta table of an operator's sink, to read it: `to_pandas`, `to_pyarrow_dataset`, `file_uris`.

        Args:
            operator: an operator, or "dead_letters".

        Raises:
            UsageError: the sink has no table: nothing was delivered to it yet, or it is of another kind.
        """
        from siltstone.sinks.delta import SinkTable
        from siltstone.store.table_place import find_table_obstacle

        with open_warehouse(self.settings) as warehouse:
            warehouse.catalog.streams.get(self.name)
            store = warehouse.warehouse.store
            table = None if find_table_obstacle(store) else SinkTable(store, self.name, operator).open()
            if table is None:
                raise UsageError(
                    f"stream {self.name} has no table of {operator}: run it first, or read the rows where its sink "
                    "writes them (a ParquetSink: sink/STREAM/OPERATOR in the warehouse)"
                )
            return table

    def optimize_sinks(self, *, dry_run: bool = False) -> "SinkMaintenance":
        """Merge small files of the Delta tables of the stream's sinks, and delete files that they no longer need.

        Files stay as long as the table's own retention says (`delta.deletedFileRetentionDuration`, 7 days unless set),
        and as long as a delivery needs them. The stream may run meanwhile.

        Args:
            dry_run: merge nothing, and only count what would be deleted.

        Raises:
            StateError: a table cannot be read or written.
        """
        from siltstone.sinks.maintenance import SinkMaintenance, optimize_sinks
        from siltstone.store.table_place import find_table_obstacle

        with open_warehouse(self.settings) as warehouse:
            if find_table_obstacle(warehouse.warehouse.store):
                warehouse.catalog.streams.get(self.name)
                return SinkMaintenance(self.name, dry_run, [], 0.0)
            return optimize_sinks(warehouse, self.name, dry_run=dry_run)

    # Savepoints

    def savepoint(self, name: str, *, at: str = LATEST, expires: str | None = None, full: bool = False) -> Savepoint:
        """Give a checkpoint a name, which protects it from deletion.

        Args:
            expires: how long it is protected, such as 12h, 30d or 4w; None until the savepoint is dropped.
            full: materialize the checkpoint first, so that it is read without any delta and can be exported.

        Raises:
            UsageError: the name is not valid, or the stream has a savepoint of that name.
        """
        from siltstone.catalog.extract_writer import try_write_extract
        from siltstone.retention import savepoints
        from siltstone.retention.retention_rules import parse_duration

        expires_in = None if expires is None else parse_duration(expires)
        with open_warehouse(self.settings) as warehouse:
            if full:
                from siltstone.spark import operations

                made = operations.full_savepoint(self.settings, self.name, name, at=at, expires_in=expires_in)
            else:
                made = savepoints.set_savepoint(warehouse.catalog, self.name, name, at=at, expires_in=expires_in)
            try_write_extract(warehouse, self.name)
            return Savepoint(self.name, **savepoints.describe_savepoint(warehouse.catalog, made))

    def drop_savepoint(self, name: str) -> SavepointDropped:
        """Remove a savepoint. Its checkpoint stays until retention or a user deletes it.

        Raises:
            UsageError: the stream has no savepoint of that name.
        """
        from siltstone.catalog.extract_writer import try_write_extract
        from siltstone.retention import savepoints

        with open_warehouse(self.settings) as warehouse:
            savepoints.drop_savepoint(warehouse.catalog, self.name, name)
            try_write_extract(warehouse, self.name)
        return SavepointDropped(self.name, name)

    def savepoints(self) -> SavepointList:
        """List the savepoints, including expired ones."""
        from siltstone.retention.savepoints import list_savepoints

        with open_warehouse(self.settings) as warehouse:
            return SavepointList(self.name, list_savepoints(warehouse.catalog, self.name))

    def export_savepoint(self, name: str, to: str) -> "SavepointExport":
        """Copy a full savepoint to a place of its own, from where `Client.import_savepoint` takes it.

        If it fails or is killed, repeat it: it goes on with what is missing. The stream may run meanwhile.

        Args:
            to: an empty place for it: a path, or an s3://, redis://, cassandra:// or rocksdb:// URL.

        Raises:
            UsageError: there is no such savepoint, or it is not full, or the place holds something else.
            CorruptObject: an object is damaged.
        """
        from siltstone.change.export_savepoint import export_savepoint

        with open_warehouse(self.settings) as warehouse:
            return export_savepoint(warehouse, self.name, name, to)
