"""What readers of a sink's Delta table see, commit by commit."""

from collections.abc import MutableMapping

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.sinks.delta import CHECKPOINT, SinkTable
from siltstone.store.table_place import find_table_obstacle
from siltstone.stream import Stream
from tests.fault.journal import Delivered


def table_of(definition: Stream, place: OpenWarehouse, stream: str, sink: str) -> SinkTable | None:
    """The table of a sink that is defined as none; None where the warehouse cannot have tables."""
    store = place.warehouse.store
    is_table = definition.sinks[sink] is None and find_table_obstacle(store) is None
    return SinkTable(store, stream, sink) if is_table else None


def commits_of(table: SinkTable, seen: MutableMapping[tuple[str, int], pa.Table]) -> tuple[list[Delivered], list[str]]:
    """What each delivery added, in the order of the log; and what is broken, if a delivery is there twice, or the
    newest version, whose files may have been merged, has other rows than were added.

    Args:
        seen: (table, version) -> rows, of versions that were read before; added to.
    """
    opened = table.open()
    if opened is None:
        return [], []
    newest, added, ids, broken = opened.version(), list[pa.Table](), list[int](), list[str]()
    for entry in sorted(opened.history(), key=lambda entry: entry["version"]):
        if CHECKPOINT not in entry:
            continue
        key = table.prefix, entry["version"]
        if key not in seen:
            opened.load_as_version(key[1] - 1)
            before = set(opened.to_pyarrow_dataset().files)
            opened.load_as_version(key[1])
            data = opened.to_pyarrow_dataset()
            files = [file for file in data.files if file not in before]
            seen[key] = pa.concat_tables([pq.read_table(file, filesystem=data.filesystem) for file in files])
        if entry[CHECKPOINT] in ids:
            broken.append(f"id {entry[CHECKPOINT]} was committed twice")
        ids.append(entry[CHECKPOINT])
        added.append(seen[key])
    opened.load_as_version(newest)
    found = Delivered.of(0, opened.to_pyarrow_table()) if added else None
    if found is not None and found != (whole := Delivered.of(0, pa.concat_tables(added))):
        broken.append(f"its newest version has {found.rows} rows, not the {whole.rows} that were added, or others")
    return [Delivered.of(id, rows) for id, rows in zip(ids, added, strict=True)], broken
