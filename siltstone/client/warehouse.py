"""The client of one warehouse: its streams and its catalog."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siltstone.client.stream import StreamClient
from siltstone.listings import (
    Diagnosis,
    StreamList,
)
from siltstone.model import check_name
from siltstone.settings import Settings, load_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from siltstone.catalog.backup import Backup
    from siltstone.catalog.identity import Reidentified
    from siltstone.catalog.upgrading import Upgraded
    from siltstone.change.import_savepoint import SavepointImport
    from siltstone.change.rebuild import Rebuild
    from siltstone.spark.operations import (
        StreamRun,
    )
    from siltstone.stream import Stream


class Client:
    """A warehouse and its catalog. Made by `siltstone.open`."""

    def __init__(self, settings: Settings) -> None:
        self.settings: Settings = settings

    def stream(self, stream: "str | Stream") -> "StreamClient":
        """Make the client of one stream, by its name or its definition. Nothing is read yet.

        Raises:
            UsageError: the name is not valid for a stream.
        """
        return StreamClient(self.settings, stream)

    def streams(self) -> StreamList:
        """List the streams that have run here.

        Raises:
            UsageError: there is no catalog.
            Unreachable: the catalog cannot be reached.
        """
        from siltstone.catalog.warehouse import OpenWarehouse

        with OpenWarehouse.open_existing(self.settings.warehouse, self.settings.catalog) as place:
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
        """Check installation, warehouse, catalog and streams, and say what to do.

        Nothing is changed. A store or catalog that does not answer within 15 seconds is a finding, too; the other
        checks go on.

        Args:
            stream: check only this stream; None for all.

        Raises:
            UnknownStream: no stream of that name has run here.
        """
        from siltstone.doctor.examine import examine

        found = examine(self.settings, stream)
        counts = {state: sum(each.state == state for each in found) for state in ("ok", "warning", "problem")}
        return Diagnosis(stream, **counts, findings=found)

    def back_up(self, file: Path | None = None) -> "Backup":
        """Back up the catalog into one file, as of one moment. Streams may run meanwhile.

        The file is a SQLite catalog, whatever database the catalog is in.

        Args:
            file: a file that does not exist yet; None for one next to a SQLite catalog.

        Raises:
            UsageError: the file exists, or must be named.
            Unreachable: the catalog or the file's directory failed.
        """
        from siltstone.catalog.backup import back_up

        url, directory = self._catalog()
        return back_up(url, file, directory)

    def restore_catalog(self, file: Path) -> "Backup":
        """Restore the catalog from a backup, into any database that has no catalog yet.

        A stream that ran after the backup is refused until `siltstone recover STREAM --accept-loss`.

        Args:
            file: a file that a backup was written to.

        Raises:
            UsageError: the database has a catalog, or the file is not a backup.
            Unreachable: the database cannot be reached.
        """
        from siltstone.catalog.backup import bring_back

        return bring_back(file, self._catalog()[0])

    def rebuild_catalog(self, tell: Callable[[str], None] = lambda _: None) -> "Rebuild":
        """Rebuild a lost catalog from the store, into any database that has no catalog yet.

        The store has everything but a little history; the result says what it could not know. Nothing may use the
        warehouse meanwhile. If the rebuild is interrupted, repeat it.

        Args:
            tell: called with lines of progress for people.

        Returns:
            What was rebuilt, what was left out and why, and what no store says.

        Raises:
            UsageError: there is a catalog already.
            WrongWarehouse: the store holds no warehouse, or no stream that can be rebuilt.
            CorruptObject: an object that the catalog is made of is missing or damaged.
            Unreachable: the store or the database failed; call it again.
        """
        from siltstone.change.rebuild import rebuild_catalog
        from siltstone.store.open import Warehouse

        return rebuild_catalog(Warehouse.at(self.settings.warehouse), self._catalog()[0], tell)

    def upgrade(self, *, backup: Path | None = None, fence: bool = False) -> "Upgraded":
        """Upgrade a catalog that an older Siltstone made.

        It is backed up first. Nothing may use the catalog meanwhile. If the upgrade is interrupted, repeat it. Older
        versions of Siltstone refuse the catalog afterwards.

        Args:
            backup: file for the backup that is made first; None for one next to a SQLite catalog.
            fence: fence runs and readers that have not ended: none of them can write again.

        Raises:
            UsageError: a run may be in progress, or the catalog is newer than this Siltstone.
            Unreachable: the catalog failed; it is unchanged.
        """
        from siltstone.catalog.upgrading import upgrade_catalog

        url, directory = self._catalog()
        return upgrade_catalog(url, directory, file=backup, fence=fence)

    def reidentify(self) -> "Reidentified":
        """Give a copied warehouse an identity of its own, or replace one that was lost.

        Copy the store and the catalog, then do this where the copies are. If it is interrupted, repeat it.

        Raises:
            Unreachable: the store or the catalog failed; call it again.
        """
        from siltstone.catalog.warehouse import OpenWarehouse

        return OpenWarehouse.reidentify(self.settings.warehouse, self.settings.catalog)

    def import_savepoint(self, url: str, stream: str | None = None) -> "SavepointImport":
        """Begin a stream with an exported savepoint, after proving its state.

        The warehouse is made if there is none. A run of the stream continues from the savepoint. If the import is
        interrupted, the stream has no checkpoint: repeat it.

        Args:
            url: where the savepoint was exported to.
            stream: name of the stream here; None for the one that it had.

        Raises:
            UsageError: there is no whole savepoint at `url`, or a stream of that name has begun here.
            CorruptObject, ProofFailed: the savepoint is damaged; nothing changed.
        """
        from siltstone.catalog.warehouse import OpenWarehouse
        from siltstone.change.import_savepoint import import_savepoint, prove_export

        if stream is not None:
            check_name("stream", stream)
        proven = prove_export(url)
        with OpenWarehouse.open_writable(self.settings.warehouse, self.settings.catalog) as warehouse:
            return import_savepoint(warehouse, proven, stream)

    def _catalog(self) -> tuple[str, Path]:
        """Return the catalog's URL and the warehouse's directory on this machine."""
        from siltstone.store.open import Warehouse

        warehouse = Warehouse.at(self.settings.warehouse)
        return self.settings.catalog or warehouse.catalog_url, warehouse.local.root


def open_client(warehouse: str | Path | None = None, catalog: str | None = None, **options: object) -> Client:
    """Make the client of a warehouse: `siltstone.open`. Nothing is read or written yet.

    Options that are not given come from `SILTSTONE_*` in the environment, then from `siltstone.toml`, then from
    defaults.

    Args:
        warehouse: where objects are stored: a path, or a file://, s3://, redis://, cassandra:// or rocksdb:// URL.
        catalog: SQLAlchemy URL; None for SQLite inside a local warehouse.
        options: any other option of `siltstone.toml`, such as `streams`, `parallelism`, `policy` or `retention`.

    Raises:
        UsageError: an unknown option, or a value that an option does not allow.
    """
    return Client(load_settings(warehouse=None if warehouse is None else str(warehouse), catalog=catalog, **options))


def write_stream(
    rows: "DataFrame | Mapping[str, DataFrame]",
    stream: "Stream",
    *,
    trigger: Mapping[str, Any] | None = None,
    warehouse: str | Path | None = None,
    catalog: str | None = None,
    **options: object,
) -> "StreamRun":
    """Run a stream over a streaming DataFrame: `open(warehouse, catalog).stream(stream).write_stream(rows, ...)`.

    Args:
        rows: a streaming DataFrame, instead of the stream's source; of several sources, source -> streaming DataFrame.
        trigger: arguments of Spark's `DataStreamWriter.trigger`, such as `{"availableNow": True}`; None starts each
            micro-batch as soon as the one before it is done.
        warehouse, catalog, options: see `siltstone.open`. To limit micro-batches or to give up state or sources, use
            the method.
    """
    return open_client(warehouse, catalog, **options).stream(stream).write_stream(rows, trigger=trigger)
