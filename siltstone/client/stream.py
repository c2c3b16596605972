"""One stream of a warehouse: run it, restore and prove it, change it, keep its chains short."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siltstone.client.view import StreamView
from siltstone.errors import UsageError
from siltstone.listings import Retention, Savepoint, SavepointDropped
from siltstone.model import LATEST
from siltstone.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from siltstone.change.export_savepoint import SavepointExport
    from siltstone.change.fork import Forked
    from siltstone.change.recover import Recovery
    from siltstone.restore.series import RestoredLabel
    from siltstone.retention.deletion import DeletionResult
    from siltstone.retention.sweep import SweepResult
    from siltstone.retention.truncate import Truncation
    from siltstone.run.region import Completed
    from siltstone.sinks.maintenance import SinkMaintenance
    from siltstone.spark.operations import (
        EditResult,
        MaterializeResult,
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
    from siltstone.spark.operations.edit_rows import Change
    from siltstone.stream import Stream


class StreamClient(StreamView):
    """One stream of a warehouse. Made by `Client.stream`.

    Methods that run the stream's operators (`run`, `rescale`, `edit`, `replay`) need its definition: the given
    `Stream`, or else the one of that name in the modules of the option `streams`. The others need only its name. `at`
    is a checkpoint's id, a commit time (ISO 8601), a savepoint or "latest".

    Every method may raise `UnknownStream` or `UnknownCheckpoint` if no stream or checkpoint matches, and `Unreachable`
    if the store or the catalog does not answer.
    """

    def __init__(self, settings: Settings, stream: "str | Stream") -> None:
        super().__init__(settings, stream if isinstance(stream, str) else stream.name)
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
        finish: bool = False,
        who: str | None = None,
        on_checkpoint: "Callable[[Completed], None]" = lambda _: None,
    ) -> "RunResult":
        """Process the source's input, starting after the newest checkpoint.

        If that checkpoint turns out to be damaged, the stream is recovered first, once, unless the settings forbid it.
        SIGTERM or Ctrl-C ends the run after the step in progress, with a checkpoint.

        Args:
            batches: stop after this number of micro-batches; None for all input.
            follow: keep waiting for input until SIGTERM or Ctrl-C.
            options: source options of the stream.
            drop: give up the state of operators, or variables (`OPERATOR.VARIABLE`), that the code no longer has, or
                sources (`source.NAME`).
            finish: once all input is processed, fire all that waits for event time. Every row that comes later is late.
            who: the owner of the run, for display; None for this process.
            on_checkpoint: called with each completed checkpoint.

        Raises:
            Stopped: a signal ended the run before the end of its input; not with `follow`.
            Fenced: a newer run has taken over the stream.
            SchemaConflict: recorded state does not fit the definition.
            StateError: a step or a sink failed.
        """
        if batches is not None and batches < 1:
            raise UsageError(f"batches is {batches}: use 1 or more, or leave it out to process all input")
        if finish and (follow or batches is not None):
            raise UsageError("finish needs the end of the input: leave out follow and batches")
        from siltstone.spark import operations

        request = operations.RunRequest(batches, follow, options or {}, who, drop, finish)
        return operations.run(self.settings, self.definition, request, on_checkpoint)

    def write_stream(
        self,
        rows: "DataFrame | Mapping[str, DataFrame]",
        *,
        trigger: Mapping[str, Any] | None = None,
        batches: int | None = None,
        drop: Sequence[str] = (),
        on_checkpoint: "Callable[[Completed], None]" = lambda _: None,
    ) -> "StreamRun":
        """Run the stream over a streaming DataFrame of your own, instead of its source.

        Returns once the query has begun. The source must keep the input it has delivered, because a rollback and a
        replay read it again.

        Args:
            rows: a streaming DataFrame; the stream runs in its Spark session. For a stream with several sources,
                source -> streaming DataFrame.
            trigger: arguments of Spark's `DataStreamWriter.trigger`, such as `{"availableNow": True}`; None starts each
                micro-batch as soon as the one before it is done.
            batches: stop after this number of micro-batches; None for no limit.
            drop: give up the state of operators, or variables (`OPERATOR.VARIABLE`), that the code no longer has, or
                sources (`source.NAME`).
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

    # Restoring and proving

    def restore(
        self, *, at: str = LATEST, as_of: str | None = None, to: Path | None = None, only: Sequence[str] = ()
    ) -> "RestoreResult":
        """Restore a checkpoint's state, prove it, and write it as Parquet if `to` is given.

        Args:
            as_of: an event time (ISO 8601), instead of `at`: the newest checkpoint without a later event.
            to: a directory that does not exist yet, for the Parquet files; None only proves the state.
            only: restore only these operators, or variables as `OPERATOR.VARIABLE`; empty for all.

        Raises:
            UsageError: a name in `only` does not exist, or the parallelism exceeds the number of key groups.
            CorruptObject, ProofFailed: the chain is damaged; nothing is left at `to`.
        """
        if as_of and at != LATEST:
            raise UsageError("at and as_of exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.restore(self.settings, self.name, at=at, as_of=as_of, to=to, only=only)

    def restore_series(
        self, labels: Mapping[str, int], on_label: "Callable[[RestoredLabel], None]" = lambda _: None
    ) -> "SeriesResult":
        """Restore many checkpoints, each as Parquet under a label.

        They are written to restored/STREAM/series/LABEL in the warehouse; each chain is read once. A label that already
        holds its checkpoint, proven, is not written again: if the restore is interrupted, repeat it.

        Args:
            labels: labels, which become names of directories, each with its checkpoint.
            on_label: called with each label that was restored.

        Raises:
            UsageError: a label is not valid.
        """
        from siltstone.spark import operations

        return operations.restore_series(self.settings, self.name, labels, on_label)

    def verify(
        self, *, at: str = LATEST, every: bool = False, deep: bool = False, sample: int | None = None
    ) -> "VerifyResult":
        """Prove that checkpoints restore to exactly the state that the stream had.

        The outcome is recorded in the catalog.

        Args:
            every: prove every retained checkpoint, instead of `at`.
            deep: also compare row by row with the full snapshots that were taken.
            sample: prove the newest checkpoint, those not proven yet, and this many of the others, proven longest ago.

        Raises:
            UsageError: `deep`, and none of the checkpoints has a snapshot.
        """
        given = {"at": at != LATEST, "every": every, "sample": sample is not None}
        if len(names := [name for name, is_given in given.items() if is_given]) > 1:
            raise UsageError(f"{' and '.join(names)} exclude each other: leave one out")
        if sample is not None and sample < 0:
            raise UsageError(f"sample is {sample}: use 0 or more")
        from siltstone.spark import operations

        return operations.verify(self.settings, self.name, at=at, every=every, deep=deep, sample=sample)

    def snapshot(self) -> "SnapshotResult":
        """Copy the newest state in full, for `siltstone verify --deep` to compare with.

        Raises:
            NoLiveState: the master is a cluster, this machine does not have the live state of the newest checkpoint, or
                a run has changed it.
            UsageError: the checkpoint already has a snapshot.
        """
        from siltstone.spark import operations

        return operations.snapshot(self.settings, self.name)

    def compare_snapshot(self) -> "SnapshotComparison":
        """Restore the newest checkpoint that has a snapshot, and compare the two row by row.

        Raises:
            UsageError: no checkpoint has a snapshot.
            CorruptObject, ProofFailed: the chain or the snapshot is damaged.
        """
        from siltstone.spark import operations

        return operations.compare_snapshot(self.settings, self.name)

    # Changing

    def fork(self, new: str, *, at: str = LATEST) -> "Forked":
        """Begin a new stream at a checkpoint of this one, without copying objects.

        A run of the new stream continues from that checkpoint.

        Args:
            new: name of the new stream.

        Raises:
            UsageError: `new` is not a valid name, or a stream of that name exists.
        """
        from siltstone.change.fork import fork

        with self._open() as warehouse:
            return fork(warehouse, self.name, new, at)

    def rescale(self, parallelism: int) -> "RescaleResult":
        """Change the parallelism of the stream: make a new checkpoint and prove it.

        A run in progress is fenced. Later runs use this parallelism unless the settings have another one, which applies
        to that run only.

        Args:
            parallelism: subtasks per operator, 1 to max_parallelism.

        Raises:
            UsageError: the parallelism exceeds max_parallelism, or logged steps must be run again first.
            CorruptObject, ProofFailed: the chain is damaged; the stream is unchanged.
        """
        from siltstone.spark import operations

        return operations.rescale(self.settings, self.definition, parallelism)

    def edit(
        self, operator: str, variable: str, rows: "Path | DataFrame | Change", *, dry_run: bool = False
    ) -> "EditResult":
        """Insert, replace or delete rows of any variable, in a new proven checkpoint.

        The rows have the columns of `table(operator, variable)`. They are put in place of those with the same key. A
        row whose __deleted (boolean) is true deletes its key. Everything is checked before anything changes. A run in
        progress is fenced. `docs/forks-and-edits.md` tells what is particular to each kind of variable.

        Args:
            operator: operator whose state to edit.
            variable: one of its variables; "prepared" for what it prepares for its checkpoints.
            rows: a Parquet file that every executor can read; a DataFrame; or a function that gets the rows of the
                newest checkpoint as a DataFrame and returns those to put or delete. It is called again if a run
                completes a checkpoint meanwhile.
            dry_run: check and count the rows; change nothing.

        Raises:
            UsageError: the operator or variable does not exist, the rows do not fit, or logged steps must be run again
                first; nothing was changed.
        """
        from siltstone.spark import operations

        return operations.edit(self.settings, self.definition, operator, variable, rows, dry_run=dry_run)

    # When something broke

    def recover(
        self, *, dry_run: bool = False, accept_loss: bool = False, on_step: Callable[[str], None] = lambda _: None
    ) -> "Recovery":
        """Go back to the newest checkpoint that restores. A stream whose newest checkpoint restores is not changed.

        The next run makes the checkpoints that were given up again, from the source and under the same ids. A run
        recovers by itself, but never past a savepoint or an edit, past more than 3 checkpoints, or to the empty state.

        Args:
            dry_run: say what would be given up and why; change nothing and stop no run.
            accept_loss: if needed, go back past savepoints, edits or more than 3 checkpoints, or to the empty state; if
                nothing is damaged, but the last run found that the input of logged steps has changed, give these up:
                sinks get rows of the same input again, under new ids.
            on_step: called with each line of progress.

        Raises:
            LossRefused: it would give up more than is allowed without `accept_loss`; nothing was given up.
            Fenced: a run has taken over the stream meanwhile; nothing was given up.
        """
        from siltstone.spark import operations

        return operations.recover(self.settings, self.name, dry_run=dry_run, accept_loss=accept_loss, on_step=on_step)

    def replay(
        self, *, to: str = LATEST, since: str | None = None, on_step: Callable[[str], None] = lambda _: None
    ) -> "ReplayResult":
        """Rebuild state from the logged input, and compare digests at every checkpoint.

        The stream is not changed, and no output is delivered.

        Args:
            to: checkpoint whose state to rebuild.
            since: checkpoint to begin with, or "start"; None for the last edit or the start.
            on_step: called with a line about each step.

        Raises:
            UsageError: it cannot begin at `since`, or source data are missing.
            SchemaConflict: the definition does not fit the recorded state.
            ProofFailed: the rebuilt state differs from what was recorded.
            CorruptObject: the checkpoint it begins with is damaged.
            StateError: a step failed.
        """
        from siltstone.spark import operations

        return operations.replay(self.settings, self.definition, to=to, since=since, on_step=on_step)

    # Chains and storage

    def materialize(
        self,
        *,
        at: str = LATEST,
        operators: Sequence[str] = (),
        due: bool = False,
        on_operator: Callable[[str], None] = lambda _: None,
    ) -> "MaterializeResult":
        """Consolidate chains into new bases, on which later checkpoints build. The stream may run meanwhile.

        Args:
            operators: materialize only these operators; empty for all.
            due: only operators that are due by the settings ([materialization]).
            on_operator: called with each operator's name before it is materialized.

        Raises:
            UsageError: an operator does not exist or is being materialized by another process, or the parallelism
                exceeds the number of key groups.
            CorruptObject, ProofFailed: a chain is damaged; that operator is unchanged.
        """
        if due and at != LATEST:
            raise UsageError("due and at exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.materialize(
            self.settings, self.name, at=at, operators=operators, due=due, on_operator=on_operator
        )

    def truncate(self, *, dry_run: bool = False) -> "Truncation":
        """Delete the checkpoints that retention does not keep, and what only they need.

        A checkpoint is kept if any rule keeps it; the newest one and savepoints are always kept. Rules of the settings
        ([retention]) replace those recorded with the stream. Without any rule, nothing is deleted.

        Args:
            dry_run: list what would be kept and why, and what deleted; change nothing.
        """
        from siltstone.retention.truncate import truncate

        with self._open() as warehouse:
            return truncate(warehouse, self.name, self.settings.retention, dry_run=dry_run)

    def retention(self, rules: Mapping[str, Any] | None = None) -> Retention:
        """Show or change which checkpoints the stream keeps. New rules replace those recorded with the stream.

        Its runs and truncations follow these rules, unless the settings have some ([retention]).

        Args:
            rules: new rules, such as `{"keep_last": 500}` or `{"keep_all": True}`; None changes nothing.
        """
        from siltstone.catalog.extract_writer import try_write_extract
        from siltstone.retention.retention_rules import RetentionOptions
        from siltstone.retention.truncate import describe_retention

        with self._open() as warehouse:
            if rules:
                warehouse.catalog.streams.set_retention(self.name, RetentionOptions.model_validate(rules).to_record())
                try_write_extract(warehouse, self.name)
            found = describe_retention(warehouse.catalog, self.name, self.settings.retention)
        return Retention(self.name, found["recorded"], found["in_force"], found["from"], found["described"])

    def delete(self, checkpoints: Sequence[int]) -> "DeletionResult":
        """Delete checkpoints. One that others build on is only marked, and deleted with the last of them.

        Args:
            checkpoints: ids of checkpoints; not the newest.

        Raises:
            UsageError: one of them has a savepoint or is the newest; nothing is deleted.
        """
        from siltstone.retention.deletion import delete_checkpoints
        from siltstone.retention.retention_rules import retention_in_force

        with self._open() as warehouse:
            rules = retention_in_force(warehouse.catalog.streams.get(self.name).retention, self.settings.retention)
            return delete_checkpoints(warehouse, self.name, checkpoints, input_log=rules.input_log)

    def sweep(
        self,
        *,
        dry_run: bool = False,
        limit: int | None = None,
        incomplete: bool = False,
        age_guard: str = "3d",
        who: str | None = None,
    ) -> "SweepResult":
        """Delete stored objects that nothing refers to, such as those of killed runs.

        Args:
            dry_run: list what would be deleted and why; change nothing.
            limit: most objects to delete; None for all.
            incomplete: search only entries of checkpoints that did not complete.
            age_guard: keep younger objects that a run may still be writing: 12h, 3d or 1w.
            who: recorded with each deletion; None for this process.
        """
        from siltstone.retention.sweep import SweepOptions, sweep
        from siltstone.times import parse_duration

        options = SweepOptions(limit, dry_run, incomplete, parse_duration(age_guard))
        with self._open() as warehouse:
            return sweep(warehouse, self.name, options, who)

    def optimize_sinks(self, *, dry_run: bool = False) -> "SinkMaintenance":
        """Merge small files of the stream's Delta tables, and delete files that are not needed.

        Files stay as long as the table's own retention says (delta.deletedFileRetentionDuration, 7 days unless set),
        and as long as a delivery needs them. The stream may run meanwhile.

        Args:
            dry_run: merge nothing, and only count what would be deleted.

        Raises:
            StateError: a table cannot be read or written.
        """
        from siltstone.sinks.maintenance import optimize_sinks

        with self._open() as warehouse:
            return optimize_sinks(warehouse, self.name, dry_run=dry_run)

    # Savepoints

    def savepoint(self, name: str, *, at: str = LATEST, expires: str | None = None, full: bool = False) -> Savepoint:
        """Give a checkpoint a name, which protects it from deletion.

        Args:
            name: name of the savepoint.
            expires: keep it only this long: 12h, 30d or 4w; None until it is dropped.
            full: materialize the checkpoint first, so that it is read without any delta and can be exported.

        Raises:
            UsageError: the name is not valid, or the stream has a savepoint of that name.
        """
        from siltstone.catalog.extract_writer import try_write_extract
        from siltstone.retention import savepoints
        from siltstone.times import parse_duration

        expires_in = None if expires is None else parse_duration(expires)
        with self._open() as warehouse:
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

        with self._open() as warehouse:
            savepoints.drop_savepoint(warehouse.catalog, self.name, name)
            try_write_extract(warehouse, self.name)
        return SavepointDropped(self.name, name)

    def export_savepoint(self, name: str, to: str) -> "SavepointExport":
        """Copy a full savepoint out of the warehouse, for another one to import.

        The stream may run meanwhile. If the export is interrupted, repeat it: it goes on with what is missing.

        Args:
            name: name of the savepoint.
            to: an empty place: a path, or an s3://, redis://, cassandra:// or rocksdb:// URL.

        Raises:
            UsageError: no savepoint has this name, it is not a full one, or where it is to go there is something else.
            CorruptObject: an object is damaged.
        """
        from siltstone.change.export_savepoint import export_savepoint

        with self._open() as warehouse:
            return export_savepoint(warehouse, self.name, name, to)
