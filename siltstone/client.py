"""The client: one object for a warehouse, one for each of its streams, one method for each operation.

    import siltstone as st

    warehouse = st.open("./warehouse")
    flights = warehouse.stream("flights")
    flights.run()
    flights.verify(every=True).failed

Nothing stays open between calls. A method opens the store and the catalog, does its work, and returns one frozen
result, which `to_json()` prints. The command line, the jobs and Dagster call exactly these methods.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from siltstone.errors import UsageError
from siltstone.listings import (
    CheckpointDetails,
    CheckpointList,
    DeletionList,
    Diagnosis,
    Report,
    Retention,
    Savepoint,
    SavepointDropped,
    SavepointList,
    StreamList,
)
from siltstone.model import LATEST, check_name
from siltstone.settings import Settings, load_settings

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import DataFrame, SparkSession

    from siltstone.catalog.backup import Backup
    from siltstone.catalog.identity import Reidentified
    from siltstone.catalog.upgrading import Upgraded
    from siltstone.catalog.warehouse import OpenWarehouse
    from siltstone.change.fork import Forked
    from siltstone.change.recover import Recovery
    from siltstone.restore.series import RestoredLabel
    from siltstone.retention.deletion import DeletionResult
    from siltstone.retention.sweep import SweepResult
    from siltstone.retention.truncate import Truncation
    from siltstone.run.region import Completed
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
    from siltstone.stream import Stream


def _ignore(_: Any) -> None:
    """What progress is told to where nobody asked for it."""


class Client:
    """A warehouse and its catalog. Made by `siltstone.open`."""

    def __init__(self, settings: Settings) -> None:
        self.settings: Settings = settings

    def stream(self, stream: "str | Stream") -> "StreamClient":
        """One stream, by its name or its definition. Nothing is looked up yet.

        Raises:
            UsageError: the name is not a stream's name.
        """
        return StreamClient(self.settings, stream)

    def streams(self) -> StreamList:
        """List the streams that have run here.

        Raises:
            NoCatalog, Unreachable: there is no catalog, or it cannot be reached.
        """
        with _opened(self.settings) as place:
            catalog = place.catalog
            recorded = catalog.streams.list()
            newest = {each.name: catalog.checkpoints.last_id(each.name) for each in recorded}
            return StreamList(
                [
                    {
                        "stream": each.name,
                        "max_parallelism": each.max_parallelism,
                        "parallelism": each.parallelism,
                        "forked_from": each.forked_from,
                        "forked_at": each.forked_at,
                        "newest": newest[each.name] or None,
                    }
                    for each in recorded
                ]
            )

    def doctor(self, stream: str | None = None) -> Diagnosis:
        """Look at the warehouse, its catalog and its streams (or one), and say what to do; changes nothing.

        What does not answer within 15 seconds is a finding, too.

        Raises:
            UnknownStream: there is no such stream.
        """
        from siltstone.doctor.examine import examine

        found = examine(self.settings, stream)
        counts = {state: sum(each.state == state for each in found) for state in ("ok", "warning", "problem")}
        return Diagnosis(stream, **counts, findings=found)

    def back_up(self, file: Path | None = None) -> "Backup":
        """Back the catalog up into one SQLite file, as it is at one moment; streams may run meanwhile.

        Args:
            file: a file that does not exist; None for one beside a SQLite catalog.

        Raises:
            UsageError: the file exists, or has to be named.
            Unreachable: the catalog or the file's directory failed.
        """
        from siltstone.catalog.backup import back_up

        url, directory = self._catalog()
        return back_up(url, file, directory)

    def restore_catalog(self, file: Path) -> "Backup":
        """Bring the catalog back from a backup, where there is none, into any kind of database.

        Raises:
            UsageError: there is a catalog, or the file is not a backup.
            Unreachable: the database cannot be reached.
        """
        from siltstone.catalog.backup import bring_back

        return bring_back(file, self._catalog()[0])

    def upgrade(self, *, backup: Path | None = None, fence: bool = False) -> "Upgraded":
        """Upgrade a catalog that an older Siltstone made, after a backup. Nothing may run on it meanwhile.

        Args:
            backup: the backup's file; None for one beside a SQLite catalog.
            fence: give up runs and readers that have not ended, and let none of them write again.

        Raises:
            UsageError: a run may be at work, or the catalog is newer.
            Unreachable: the catalog failed; it is as it was.
        """
        from siltstone.catalog.upgrading import upgrade_catalog

        url, directory = self._catalog()
        return upgrade_catalog(url, directory, file=backup, fence=fence)

    def reidentify(self) -> "Reidentified":
        """Give a copied warehouse an identity of its own, or one whose identity was lost a new one.

        Raises:
            Unreachable: the store or the catalog failed; do it again.
        """
        from siltstone.catalog.warehouse import OpenWarehouse

        return OpenWarehouse.reidentify(self.settings.warehouse, self.settings.catalog)

    def _catalog(self) -> tuple[str, Path]:
        """The catalog's URL, and the warehouse's directory on this machine."""
        from siltstone.store.open import Warehouse

        warehouse = Warehouse.at(self.settings.warehouse)
        return self.settings.catalog or warehouse.catalog_url, warehouse.local.root


class StreamClient:
    """One stream of a warehouse. Made by `Client.stream`.

    Methods that run the stream's operators (`run`, `rescale`, `edit`, `replay`) need its definition: the `Stream` that
    was given, or else the one of that name in the modules that the option `streams` names. The others need only its
    name. `at` is a checkpoint's id, a commit time (ISO 8601), a savepoint or "latest".

    Every method may raise `UnknownStream` or `UnknownCheckpoint` where nothing answers to a name, id or time, and
    `Unreachable` where the store or the catalog does not answer.
    """

    def __init__(self, settings: Settings, stream: "str | Stream") -> None:
        self.settings: Settings = settings
        self.name: str = stream if isinstance(stream, str) else stream.name
        check_name("stream", self.name)
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
        on_checkpoint: "Callable[[Completed], None]" = _ignore,
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
        on_checkpoint: "Callable[[Completed], None]" = _ignore,
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
        with _opened(settings) as place:
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

        with _opened(self.settings) as place:
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

        with _opened(self.settings) as place:
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
        with _opened(settings) as place:
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
        self, labels: Mapping[str, int], on_label: "Callable[[RestoredLabel], None]" = _ignore
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

    # Chains and storage

    def materialize(
        self,
        *,
        at: str = LATEST,
        operators: Sequence[str] = (),
        due: bool = False,
        on_operator: Callable[[str], None] = _ignore,
    ) -> "MaterializeResult":
        """Consolidate a checkpoint's chains into new bases, while the stream may run.

        Args:
            operators: only these.
            due: of these, only those for which it is time, as the settings say.
            on_operator: called with each as its turn comes.
        """
        if due and at != LATEST:
            raise UsageError("due and at exclude each other: leave one out")
        from siltstone.spark import operations

        return operations.materialize(
            self.settings, self.name, at=at, operators=operators, due=due, on_operator=on_operator
        )

    def truncate(self, *, dry_run: bool = False) -> "Truncation":
        """Delete the checkpoints that retention does not keep, and what only they need.

        The rules are those of the settings (`siltstone.open(..., retention={"keep_last": 10})`), or else those recorded
        with the stream.

        Args:
            dry_run: only say what would be done.
        """
        from siltstone.retention.truncate import truncate

        with _opened(self.settings) as place:
            return truncate(place, self.name, self.settings.retention, dry_run=dry_run)

    def retention(self, rules: Mapping[str, Any] | None = None) -> Retention:
        """Say what the stream keeps; with `rules`, record those with it first, in place of what was recorded.

        Args:
            rules: such as `{"keep_last": 500, "keep_daily": 7}` or `{"keep_all": True}`.
        """
        from siltstone.retention.retention_rules import RetentionOptions
        from siltstone.retention.truncate import describe_retention

        with _opened(self.settings) as place:
            if rules:
                place.catalog.streams.set_retention(self.name, RetentionOptions.model_validate(rules).to_record())
            found = describe_retention(place.catalog, self.name, self.settings.retention)
        return Retention(self.name, found["recorded"], found["in_force"], found["from"], found["described"])

    def delete(self, checkpoints: Sequence[int]) -> "DeletionResult":
        """Delete checkpoints, but not the newest. One that others build on is marked, and goes with the last of them.

        Raises:
            UsageError: one of them has a savepoint, or is the newest; nothing is deleted.
        """
        from siltstone.retention.deletion import delete_checkpoints
        from siltstone.retention.retention_rules import retention_in_force

        with _opened(self.settings) as place:
            rules = retention_in_force(place.catalog.streams.get(self.name).retention, self.settings.retention)
            return delete_checkpoints(place, self.name, checkpoints, input_log=rules.input_log)

    def deletions(self, limit: int | None = None) -> DeletionList:
        """List what was deleted from the stream in the last 90 days, by hand or automatically, and by whom."""
        from siltstone.chains.inspect import list_deletions

        with _opened(self.settings) as place:
            return DeletionList(self.name, list_deletions(place.catalog, self.name, limit))

    def sweep(
        self,
        *,
        dry_run: bool = False,
        limit: int | None = None,
        incomplete: bool = False,
        age_guard: str = "3d",
        who: str | None = None,
    ) -> "SweepResult":
        """Delete stored objects that nothing refers to: of runs that were killed, and of attempts that lost.

        Args:
            dry_run: only say what would be deleted and why.
            limit: delete at most so many objects.
            incomplete: look only where checkpoints did not complete.
            age_guard: how old what a run may be writing must be: 12h, 3d or 1w.
            who: recorded with each deletion; None for this process.
        """
        from siltstone.retention.retention_rules import parse_duration
        from siltstone.retention.sweep import SweepOptions, sweep

        options = SweepOptions(limit, dry_run, incomplete, parse_duration(age_guard))
        with _opened(self.settings) as place:
            return sweep(place, self.name, options, who)

    # Savepoints

    def savepoint(self, name: str, *, at: str = LATEST, expires: str | None = None) -> Savepoint:
        """Give a checkpoint a name, which keeps it from deletion.

        Args:
            expires: keep it for 12h, 30d or 4w only; None until the name is dropped.

        Raises:
            UsageError: not a savepoint's name, or one that is taken.
        """
        from siltstone.retention import savepoints
        from siltstone.retention.retention_rules import parse_duration

        expires_in = None if expires is None else parse_duration(expires)
        with _opened(self.settings) as place:
            made = savepoints.set_savepoint(place.catalog, self.name, name, at=at, expires_in=expires_in)
            return Savepoint(self.name, **savepoints.describe_savepoint(place.catalog, made))

    def drop_savepoint(self, name: str) -> SavepointDropped:
        """Forget a savepoint. Its checkpoint stays until retention or somebody deletes it.

        Raises:
            UsageError: there is no savepoint of that name.
        """
        from siltstone.retention import savepoints

        with _opened(self.settings) as place:
            savepoints.drop_savepoint(place.catalog, self.name, name)
        return SavepointDropped(self.name, name)

    def savepoints(self) -> SavepointList:
        """List the savepoints, expired ones too."""
        from siltstone.retention.savepoints import list_savepoints

        with _opened(self.settings) as place:
            return SavepointList(self.name, list_savepoints(place.catalog, self.name))

    # Changing

    def fork(self, new: str, *, at: str = LATEST) -> "Forked":
        """Begin the stream `new` at a checkpoint of this one, without copying any object.

        Raises:
            UsageError: `new` is not a stream's name, or there is such a stream.
        """
        from siltstone.change.fork import fork

        with _opened(self.settings) as place:
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
        self, *, dry_run: bool = False, accept_loss: bool = False, on_step: Callable[[str], None] = _ignore
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
        self, *, to: str = LATEST, since: str | None = None, on_step: Callable[[str], None] = _ignore
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


def open_client(warehouse: str | Path | None = None, catalog: str | None = None, **options: object) -> Client:
    """Open a warehouse: `siltstone.open`. Nothing is read or written yet.

    Args:
        warehouse: where objects are stored: a path, or a file://, s3://, redis:// or rocksdb:// URL.
        catalog: SQLAlchemy URL; None for SQLite inside a local warehouse.
        options: any other option of `siltstone.toml`, such as `streams`, `parallelism` or `policy`.

    What is not given comes from `SILTSTONE_*` in the environment, then from `siltstone.toml`, then from defaults.

    Raises:
        UsageError: an unknown option, or a value that it does not take.
    """
    return Client(load_settings(warehouse=None if warehouse is None else str(warehouse), catalog=catalog, **options))


def write_stream(
    rows: "DataFrame",
    stream: "Stream",
    *,
    trigger: Mapping[str, Any] | None = None,
    warehouse: str | Path | None = None,
    catalog: str | None = None,
    **options: object,
) -> "StreamRun":
    """Run a stream over a streaming DataFrame: `open(warehouse, catalog).stream(stream).write_stream(rows, ...)`.

    Args:
        rows: a streaming DataFrame, instead of the stream's source.
        trigger: arguments of Spark's `DataStreamWriter.trigger`, such as `{"availableNow": True}`; None starts each
            micro-batch as soon as the one before it is done.
        warehouse, catalog, options: see `siltstone.open`.
    """
    return open_client(warehouse, catalog, **options).stream(stream).write_stream(rows, trigger=trigger)


@contextmanager
def _opened(settings: Settings) -> "Iterator[OpenWarehouse]":
    from siltstone.catalog.warehouse import OpenWarehouse

    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        yield place
