"""Keep the tables of a stream's sinks fast and small: merge small files (OPTIMIZE), delete old ones (VACUUM).

A vacuum deletes a file below a table's directory only if all of this holds:

    the table    its log does not have the file, or has removed it longer ago than the table's own retention
                 (`delta.deletedFileRetentionDuration`, 7 days unless set), and the file is as old
    the catalog  no output refers to it, and no commit ever can: it is of a fenced or ended writer, or of a checkpoint
                 that is complete (`retention.orphan_rules`)

    1  list the files, then read the catalog, then the log: a file that the catalog no longer refers to was delivered
       before, so the log has it
    2  judge again in the transaction that records the tombstones, and delete

So no file of an outstanding delivery is deleted, however long it waits, and neither is one that a writer may still
commit, however long it was frozen. Both operations can run beside the stream.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from siltstone.catalog.records.passes import Pass
from siltstone.catalog.records.references import CatalogView
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.log import get_logger
from siltstone.result import Result
from siltstone.retention.leases import this_process
from siltstone.retention.orphan_rules import AGE_GUARD, Reason, judge
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.delta_calls import delta_call
from siltstone.store.paths import CheckpointPath, is_object_name, sink_tables
from siltstone.store.table_place import find_table_obstacle

_LOG = get_logger(__name__)
TABLE_FILES = "files that a sink's table no longer needs"
_FINAL = frozenset({Reason.FENCED, Reason.ENDED, Reason.LATE, Reason.GIVEN_UP})
"""nothing can refer to such an object again, at any time"""
_BATCH = 500


@dataclass(frozen=True, slots=True)
class TableMaintenance:
    """What was done to one sink's table: `merged` files into `written`, and `deleted` files of `bytes`."""

    sink: str
    merged: int = 0
    written: int = 0
    deleted: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class SinkMaintenance(Result):
    """What was done to the tables of a stream's sinks, or with `dry_run` which files would be deleted."""

    stream: str
    dry_run: bool
    tables: list[TableMaintenance]
    seconds: float


def optimize_sinks(warehouse: OpenWarehouse, stream: str, *, dry_run: bool = False) -> SinkMaintenance:
    """Merge the small files of each table of the stream, and delete the files that it no longer needs.

    A store that cannot have tables has none to maintain.

    Args:
        dry_run: merge nothing, and only count what would be deleted.

    Raises:
        UnknownStream: the catalog does not have the stream.
        Unreachable: the store or the catalog failed.
        StateError: the log of a table is damaged; the message says which.
    """
    start = time.perf_counter()
    warehouse.catalog.streams.get(stream)
    if find_table_obstacle(warehouse.warehouse.store):
        return SinkMaintenance(stream, dry_run, [], 0.0)
    sizes = dict(warehouse.warehouse.store.list(sink_tables(stream)))
    by_sink: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        by_sink.setdefault(name.removeprefix(sink_tables(stream)).partition("/")[0], {})[name] = size
    done = []
    for sink, files in sorted(by_sink.items()):
        table = SinkTable(warehouse.warehouse.store, stream, sink)
        merged, written = (0, 0) if dry_run else table.merge()
        deleted = _vacuum(warehouse, table, files, dry_run=dry_run)
        done.append(TableMaintenance(sink, merged, written, len(deleted), sum(deleted.values())))
    return SinkMaintenance(stream, dry_run, done, round(time.perf_counter() - start, 3))


def _vacuum(warehouse: OpenWarehouse, table: SinkTable, files: dict[str, int], *, dry_run: bool) -> dict[str, int]:
    """Delete what was listed and is not needed; returns name -> bytes."""
    catalog, store = warehouse.catalog, warehouse.warehouse.store
    view = catalog.references.view(table.stream, [name for name in files if _is_staged(name)])
    opened = table.open()
    if opened is None:
        return {}
    with delta_call(table.label):
        unneeded = {table.prefix + path for path in opened.vacuum(dry_run=True, full=True)}
    found = [name for name in files if name in unneeded and _is_unneeded(name, view)]
    ages = store.modified_at(found)
    by, deleted = Pass.begin(TABLE_FILES, this_process()), dict[str, int]()
    for names in _batches(found):

        def decide(view: CatalogView, names: Sequence[str] = names) -> list[Tombstone]:
            return [Tombstone(n, files[n], TABLE_FILES, ages.get(n)) for n in names if _is_unneeded(n, view)]

        if dry_run:
            deleted |= {name: files[name] for name in names}
            continue
        gone = catalog.tombstones.record_orphans(table.stream, by.who, names, decide, by)
        store.delete([each.name for each in gone])
        deleted |= {each.name: each.bytes for each in gone}
    if deleted and not dry_run:
        _LOG.info("vacuumed a sink", stream=table.stream, sink=table.sink, objects=len(deleted))
    return deleted


def _is_staged(name: str) -> bool:
    return CheckpointPath.of(name) is not None and is_object_name(name)


def _is_unneeded(name: str, view: CatalogView) -> bool:
    """Whether a file that the log does not need is none that a delivery needs; others than staged ones never are."""
    if not is_object_name(name):
        return False  # delta-rs is writing it
    return not _is_staged(name) or judge(name, view, AGE_GUARD) in _FINAL


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + _BATCH] for start in range(0, len(names), _BATCH))
