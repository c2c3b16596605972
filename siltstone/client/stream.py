"""One stream of a warehouse: run it, look at it, restore and prove it, change it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from siltstone.client.opening import ignore, open_warehouse
from siltstone.client.storage import StreamStorage
from siltstone.errors import UsageError
from siltstone.listings import (
    CheckpointDetails,
    CheckpointList,
    Report,
)
from siltstone.model import LATEST
from siltstone.settings import Settings

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import DataFrame, SparkSession

    from siltstone.change.fork import Forked
    from siltstone.change.recover import Recovery
    from siltstone.restore.series import RestoredLabel
    from siltstone.run.region import Completed
    from siltstone.spark.operations import (
        EditResult,
        ReplayResult,
        RescaleResult,
        RestoreResult,
        RunResult,
        SeriesResult,
        SnapshotComparison,
        SnapshotResult,
        StreamRun,
        VerifyResult,
    )
    from siltstone.stream import Stream


class StreamClient(StreamStorage):
    """One stream of a warehouse. Made by `Client.stream`.

    Methods that run the stream's operators (`run`, `rescale`, `edit`, `replay`) need its definition: the given
    `Stream`, or else the one of that name in the modules of the option `streams`. The others need only its name. `at`
    is a checkpoint's id, a commit time (ISO 8601), a savepoint or "latest".

    Every method may raise `UnknownStream` or `UnknownCheckpoint` if no stream or checkpoint matches, and `Unreachable`
    if the store or the catalog does not answer.
    """

    def __init__(self, settings: Settings, stream: "str | Stream") -> None:
        super().__init__(settings, stream)
        if not isinstance(stream, str):
            self.definition = stream

    @cached_property
    def definition(self) -> "Stream":
        """The stream's definition. A fork without one of its own uses that of the stream it was forked from.

        Raises:
            UnknownStream: no module defines it; the message lists the streams found and the modules that failed.
        """
        from siltstone.change.fork import find_definition

        return find_definition(self.settings, self.name)

    # Running

    def run(
        self,
        *,
        batches: int | None = None,
        follow: bool = False,
        options: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
        who: str | None = None,
        on_checkpoint: "Callable[[Completed], None]" = ignore,
    ) -> "RunResult":
        """Process the input that the stream's source has, starting after the newest completed checkpoint.

        SIGTERM or Ctrl-C ends the run after the step in progress, with a checkpoint.

        Args:
            batches: stop after this number of micro-batches; None for all input.
            follow: wait for more input until a signal ends the run.
            options: source options of the stream.
            drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has and whose state to give up.
            who: the owner of the run, for display; None for this process.
            on_checkpoint: called with each completed checkpoint.

        Raises:
            Stopped: a signal ended the run before the end of its input.
            Fenced: a newer run has taken over the stream.
            SchemaConflict: recorded state does not fit the definition.
            StateError: a step or a sink failed.
        """
        if batches is not None and batches < 1:
            raise UsageError(f"batches is {batches}: use 1 or more, or leave it out to process all input")
        from siltstone.spark import operations

        request = operations.RunRequest(batches, follow, options or {}, who, drop)
        return operations.run(self.settings, self.definition, request, on_checkpoint)

    def write_stream(
        self,
        rows: "DataFrame",
        *,
        trigger: Mapping[str, Any] | None = None,
        batches: int | None = None,
        drop: Sequence[str] = (),
        on_checkpoint: "Callable[[Completed], None]" = ignore,
    ) -> "StreamRun":
        """Run the stream over a streaming DataFrame of your own, instead of its source.

        Returns once the query has begun. The source must keep the input it has delivered, because a rollback and a
        replay read it again.

        Args:
            rows: a streaming DataFrame; the stream runs in its Spark session.
            trigger: arguments of Spark's `DataStreamWriter.trigger`, such as `{"availableNow": True}`; None starts each
                micro-batch as soon as the one before it is done.
            batches: stop after this number of micro-batches; None for no limit.
            drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has and whose state to give up.
            on_checkpoint: called with each completed checkpoint.

        Raises:
            UsageError: the stream cannot read these rows, or the session runs tasks on machines that cannot reach its
                sinks or catalog.
            SchemaConflict: recorded state does not fit the definition.
        """
        from siltstone.spark import operations

        given = {} if trigger is None else {"trigger": trigger}
        request = operations.RunRequest(batches, drop=drop)
        return operations.write_stream(
            self.settings, self.definition, rows, request, on_checkpoint=on_checkpoint, **given
        )

    # Looking

    def checkpoints(self, limit: int | None = None) -> CheckpointList:
        """List the completed checkpoints, or the newest `limit` of them, and the state of materialization."""
        from siltstone.chains import inspect
        from siltstone.chains.due import materialization_health

        settings = self.settings
        with open_warehouse(settings) as warehouse:
            found = inspect.list_checkpoints(warehouse.catalog, self.name, limit)
            origin = inspect.describe_origin(warehouse.catalog, self.name)
            health = materialization_health(
                warehouse.catalog, self.name, settings.materialization, settings.policy_options
            )
        listed = inspect.list_materialization(health)
        return CheckpointList(self.name, **origin, checkpoints=found, materialization=listed)

    def show(self, at: str = LATEST) -> CheckpointDetails:
        """Describe one checkpoint: its manifest with all handles, its chain and the input of its steps.

        Raises:
            CorruptObject: its manifest is damaged.
        """
        from siltstone.chains import inspect

        with open_warehouse(self.settings) as warehouse:
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
            from siltstone.spark.datasource import read_state

            return read_state(spark, self.settings, self.name, operator, variable, at, as_of, columns)
        from siltstone.format.manifests import read_manifests
        from siltstone.restore.table import LIMIT_BYTES, read_table
        from siltstone.retention.leases import hold_lease
        from siltstone.times import parse_time

        with open_warehouse(self.settings) as warehouse:
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
        """Draw the chain into a .png, .svg or .pdf file: bytes by form, what a restore reads, D, measured
        restores, and the timeline of the newest checkpoints.

        Raises:
            UsageError: the file has another suffix, or its directory does not exist.
        """
        from siltstone.report import check_picture_path, draw_report, report_data

        check_picture_path(picture)
        settings = self.settings
        with open_warehouse(settings) as warehouse:
            data = report_data(warehouse.catalog, self.name, settings.materialization, settings.policy_options)
        draw_report(data, picture)
        return Report(data, str(picture))

    # Restoring and proving

    def restore(
        self, *, at: str = LATEST, as_of: str | None = None, to: Path | None = None, only: Sequence[str] = ()
    ) -> "RestoreResult":
        """Restore a checkpoint's state from the store, prove it, and write it as Parquet to `to`.

        Args:
            as_of: an event time (ISO 8601), instead of `at`: the newest checkpoint without a later event.
            to: a directory that does not exist yet; None only proves.
            only: operators, or variables as `OPERATOR.VARIABLE`; empty for all.

        Raises:
            CorruptObject, ProofFailed: the chain is damaged; nothing is left at `to`.
        """
        if as_of and at != LATEST:
            raise UsageError("at and as_of exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.restore(self.settings, self.name, at=at, as_of=as_of, to=to, only=only)

    def restore_series(
        self, labels: Mapping[str, int], on_label: "Callable[[RestoredLabel], None]" = ignore
    ) -> "SeriesResult":
        """Restore many checkpoints, each chain read once, to `<warehouse>/restored/<stream>/series/<label>`.

        Args:
            labels: label -> checkpoint id; a label that already holds its checkpoint, proven, is not written again.
            on_label: called with each label that was restored.
        """
        from siltstone.spark import operations

        return operations.restore_series(self.settings, self.name, labels, on_label)

    def verify(self, *, at: str = LATEST, every: bool = False, deep: bool = False) -> "VerifyResult":
        """Prove that checkpoints restore to exactly the state that the stream had, and record the outcome.

        Args:
            every: prove every retained checkpoint, instead of `at`.
            deep: also compare row by row with the snapshot of each checkpoint that has one.
        """
        if every and at != LATEST:
            raise UsageError("at and every exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.verify(self.settings, self.name, at=at, every=every, deep=deep)

    def snapshot(self) -> "SnapshotResult":
        """Write the live state of the newest checkpoint in full, as a reference copy to compare restores with."""
        from siltstone.spark import operations

        return operations.snapshot(self.settings, self.name)

    def compare_snapshot(self) -> "SnapshotComparison":
        """Restore the newest checkpoint that has a snapshot, and compare the two row by row.

        Raises:
            UsageError: no checkpoint has a snapshot.
        """
        from siltstone.spark import operations

        return operations.compare_snapshot(self.settings, self.name)

    # Changing

    def fork(self, new: str, *, at: str = LATEST) -> "Forked":
        """Begin the stream `new` at a checkpoint of this one, without copying objects.

        Raises:
            UsageError: `new` is not a valid name, or a stream of that name exists.
        """
        from siltstone.change.fork import fork

        with open_warehouse(self.settings) as warehouse:
            return fork(warehouse, self.name, new, at)

    def rescale(self, parallelism: int) -> "RescaleResult":
        """Restore the newest checkpoint at another parallelism, prove it, and let later runs begin with it.

        A run in progress is fenced.

        Raises:
            UsageError: the parallelism exceeds the number of key groups.
        """
        from siltstone.spark import operations

        return operations.rescale(self.settings, self.definition, parallelism)

    def edit(self, operator: str, variable: str, rows: "Path | DataFrame", *, dry_run: bool = False) -> "EditResult":
        """Insert, replace or delete rows of one variable's table as a new checkpoint, and prove it.

        A run in progress is fenced. All rows are checked before anything changes.

        Args:
            rows: a Parquet file that every executor can read, or a DataFrame, with the key columns (for a map, also its
                own key columns), the value columns and optionally `__deleted` (boolean): true deletes the row's key.
            dry_run: only check and count the rows.
        """
        from siltstone.spark import operations

        return operations.edit(self.settings, self.definition, operator, variable, rows, dry_run=dry_run)

    # When something broke

    def recover(
        self, *, dry_run: bool = False, accept_loss: bool = False, on_step: Callable[[str], None] = ignore
    ) -> "Recovery":
        """Go back to the newest checkpoint that restores. A stream whose newest checkpoint restores is not changed.

        Args:
            dry_run: only report what would be given up and why.
            accept_loss: if needed, go back past savepoints, edits or more than 3 checkpoints, or to the empty state.
            on_step: called with each line of progress.

        Raises:
            LossRefused: it would give up more than is allowed without `accept_loss`; nothing was given up.
        """
        from siltstone.spark import operations

        return operations.recover(self.settings, self.name, dry_run=dry_run, accept_loss=accept_loss, on_step=on_step)

    def replay(
        self, *, to: str = LATEST, since: str | None = None, on_step: Callable[[str], None] = ignore
    ) -> "ReplayResult":
        """Rebuild a checkpoint's state from the logged input alone, and compare it with what was recorded.

        Args:
            to: the checkpoint whose state to rebuild: an id, commit time, savepoint or "latest".
            since: the checkpoint to begin with, or "start"; None for the earliest possible.
            on_step: called with a line about each step.

        Raises:
            ProofFailed: the rebuilt state differs from what was recorded.
        """
        from siltstone.spark import operations

        return operations.replay(self.settings, self.definition, to=to, since=since, on_step=on_step)
