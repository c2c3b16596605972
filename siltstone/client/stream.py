"""One stream of a warehouse: run it, look at it, restore and prove it, change it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from siltstone.client.opened import ignore, opened
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

    Methods that run the stream's operators (`run`, `rescale`, `edit`, `replay`) need its definition: the `Stream` that
    was given, or else the one of that name in the modules that the option `streams` names. The others need only its
    name. `at` is a checkpoint's id, a commit time (ISO 8601), a savepoint or "latest".

    Every method may raise `UnknownStream` or `UnknownCheckpoint` where nothing answers to a name, id or time, and
    `Unreachable` where the store or the catalog does not answer.
    """

    def __init__(self, settings: Settings, stream: "str | Stream") -> None:
        super().__init__(settings, stream)
        if not isinstance(stream, str):
            self.definition = stream

    @cached_property
    def definition(self) -> "Stream":
        """The stream's definition. A fork without one of its own has that of the stream it was made from.

        Raises:
            UnknownStream: there is none; the message lists what was found and what did not import.
        """
        from siltstone.change.fork import stream_named

        return stream_named(self.settings, self.name)

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
        """Process what the stream's source has, from the newest completed checkpoint on.

        SIGTERM or Ctrl-C ends it after the step in progress, with a checkpoint.

        Args:
            batches: stop after so many micro-batches.
            follow: go on, waiting for input, until a signal ends it.
            options: source options of the stream.
            drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has, whose state is given up.
            who: whose run it is, for people; None for this process.
            on_checkpoint: called with each completed checkpoint.

        Raises:
            Stopped: a signal ended it before its input did.
            Fenced: a newer run has taken the stream over.
            SchemaConflict: recorded state cannot follow the definition.
            StateError: a step or a sink failed.
        """
        if batches is not None and batches < 1:
            raise UsageError(f"batches is {batches}: run at least 1, or leave it out to run all there are")
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

        Returns once the query has begun. Any source will do that keeps what it has delivered, because a rollback and a
        replay read it again.

        Args:
            rows: a streaming DataFrame, of the Spark session to run in.
            trigger: arguments of Spark's `DataStreamWriter.trigger`, such as `{"availableNow": True}`; None starts each
                micro-batch as soon as the one before it is done.
            batches: stop after so many micro-batches.
            drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has, whose state is given up.
            on_checkpoint: called with each completed checkpoint.

        Raises:
            UsageError: the stream cannot read these rows, or the session runs tasks where its sinks or catalog are not.
            SchemaConflict: recorded state cannot follow the definition.
        """
        from siltstone.spark import operations

        given = {} if trigger is None else {"trigger": trigger}
        request = operations.RunRequest(batches, drop=drop)
        return operations.write_stream(
            self.settings, self.definition, rows, request, on_checkpoint=on_checkpoint, **given
        )

    # Looking

    def checkpoints(self, limit: int | None = None) -> CheckpointList:
        """List the completed checkpoints, or the newest `limit` of them, and how materialization does."""
        from siltstone.chains import inspect
        from siltstone.chains.due import materialization_health

        settings = self.settings
        with opened(settings) as place:
            found = inspect.list_checkpoints(place.catalog, self.name, limit)
            origin = inspect.describe_origin(place.catalog, self.name)
            health = materialization_health(place.catalog, self.name, settings.materialization, settings.policy_options)
        listed = inspect.list_materialization(health)
        return CheckpointList(self.name, **origin, checkpoints=found, materialization=listed)

    def show(self, at: str = LATEST) -> CheckpointDetails:
        """Describe one checkpoint: its manifest with all handles, its chain, the input of its steps.

        Raises:
            CorruptObject: its manifest is damaged.
        """
        from siltstone.chains import inspect

        with opened(self.settings) as place:
            return CheckpointDetails(inspect.show_checkpoint(place.catalog, place.warehouse.store, self.name, at))

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
            as_of: an event time (ISO 8601), instead of `at`: the last checkpoint without a later event.
            columns: only these.
            limit_bytes: how much memory the dataset may take; 1 GiB if not given. Without meaning for Spark.
            spark: a session; its tasks read the table.

        Raises:
            UsageError: no such operator, variable or column; or the table is too large to be read without Spark.
            CorruptObject, ProofFailed: what was stored is damaged.
        """
        if as_of is not None and at != LATEST:
            raise UsageError("at and as_of exclude each other: leave one out")
        if spark is not None:
            from siltstone.spark.datasource import read_state

            return read_state(spark, self.settings, self.name, operator, variable, at, as_of, columns)
        from siltstone.restore.restore import read_manifests
        from siltstone.restore.table import LIMIT_BYTES, read_table
        from siltstone.retention.leases import hold_lease
        from siltstone.times import parse_time

        with opened(self.settings) as place:
            found = place.catalog.checkpoints
            checkpoint = found.as_of(self.name, parse_time(as_of)) if as_of else found.resolve(self.name, at)
            with hold_lease(place.catalog, self.name, [checkpoint], what="reads"):
                store = place.warehouse.store
                manifests = read_manifests(store, place.catalog.chains.list_manifests(self.name, checkpoint), self.name)
                return read_table(store, manifests, operator, variable, columns, limit_bytes or LIMIT_BYTES)

    def report(self, picture: Path) -> Report:
        """Draw the chain into a .png, .svg or .pdf file: bytes by form, what a restore reads, D, measured restores.

        Raises:
            UsageError: the file is of another kind, or its directory does not exist.
        """
        from siltstone.report import check_picture_path, draw_report, report_data

        check_picture_path(picture)
        settings = self.settings
        with opened(settings) as place:
            data = report_data(place.catalog, self.name, settings.materialization, settings.policy_options)
        draw_report(data, picture)
        return Report(data, str(picture))

    # Restoring and proving

    def restore(
        self, *, at: str = LATEST, as_of: str | None = None, to: Path | None = None, only: Sequence[str] = ()
    ) -> "RestoreResult":
        """Rebuild a checkpoint's state from the store, prove it, and write it as Parquet where `to` says.

        Args:
            as_of: an event time (ISO 8601), instead of `at`: the last checkpoint without a later event.
            to: a directory that does not exist yet; None only proves.
            only: operators, or variables as `OPERATOR.VARIABLE`: nothing else is read.

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
            labels: label -> checkpoint id; a label that holds its checkpoint, proven, is kept.
            on_label: called with each label that is restored.
        """
        from siltstone.spark import operations

        return operations.restore_series(self.settings, self.name, labels, on_label)

    def verify(self, *, at: str = LATEST, every: bool = False, deep: bool = False) -> "VerifyResult":
        """Prove that checkpoints restore to exactly the state the stream had; the outcome is recorded.

        Args:
            every: every retained checkpoint, instead of `at`.
            deep: also compare, row by row, with the snapshot of each checkpoint that has one.
        """
        if every and at != LATEST:
            raise UsageError("at and every exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.verify(self.settings, self.name, at=at, every=every, deep=deep)

    def snapshot(self) -> "SnapshotResult":
        """Write the live state of the newest checkpoint in full: a reference copy, to compare restores with."""
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
        """Begin the stream `new` at a checkpoint of this one, without copying any object.

        Raises:
            UsageError: `new` is not a stream's name, or there is such a stream.
        """
        from siltstone.change.fork import fork

        with opened(self.settings) as place:
            return fork(place, self.name, new, at)

    def rescale(self, parallelism: int) -> "RescaleResult":
        """Restore the newest checkpoint at another parallelism, prove it, and let later runs begin with it.

        A run at work is fenced.

        Raises:
            UsageError: more parallelism than key groups.
        """
        from siltstone.spark import operations

        return operations.rescale(self.settings, self.definition, parallelism)

    def edit(self, operator: str, variable: str, rows: "Path | DataFrame", *, dry_run: bool = False) -> "EditResult":
        """Put rows into one variable's table, or delete them, as a new checkpoint, and prove it.

        A run at work is fenced. All rows are checked before anything changes.

        Args:
            rows: a Parquet file that every executor sees, or a DataFrame: the key columns (of a map its own key too),
                the value columns, and perhaps `__deleted` (boolean), which says which keys are to be deleted.
            dry_run: only say how many rows there are.
        """
        from siltstone.spark import operations

        return operations.edit(self.settings, self.definition, operator, variable, rows, dry_run=dry_run)

    # When something broke

    def recover(
        self, *, dry_run: bool = False, accept_loss: bool = False, on_step: Callable[[str], None] = ignore
    ) -> "Recovery":
        """Go back to the newest checkpoint that restores. A sound stream is left alone.

        Args:
            dry_run: only say what would be given up and why.
            accept_loss: go back past savepoints, edits and more than 3 checkpoints, or to nothing, if need be.
            on_step: told what is done and found, line by line.

        Raises:
            LossRefused: more would be given up than may be without `accept_loss`; nothing was.
        """
        from siltstone.spark import operations

        return operations.recover(self.settings, self.name, dry_run=dry_run, accept_loss=accept_loss, on_step=on_step)

    def replay(
        self, *, to: str = LATEST, since: str | None = None, on_step: Callable[[str], None] = ignore
    ) -> "ReplayResult":
        """Rebuild a checkpoint's state from the logged input alone, and compare it with all that was recorded.

        Args:
            to: whose state: an id, commit time, savepoint or "latest".
            since: where to begin: the same, or "start"; None for as early as can be.
            on_step: told about each step that is done.

        Raises:
            ProofFailed: what it came to differs from what was recorded.
        """
        from siltstone.spark import operations

        return operations.replay(self.settings, self.definition, to=to, since=since, on_step=on_step)
