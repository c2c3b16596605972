"""Warehouses that are kept as Siltstone wrote them, for every later version to read (`tests.golden_archives`).

An archive holds a warehouse (objects and SQLite catalog) and, in `expected.json`, what it must give: the digest and the
rows of each checkpoint. The stream stays as it is, once a version was released: a change of it would be a change of an
operator's definition.

The stream has everything that is stored: bases, deltas of several steps, tables and opaque values that did not change,
opaque values in objects of their own, a materialization, a full snapshot, staged outputs, a savepoint, a fork, and
checkpoints that were given up.
"""

import json
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from siltstone.aggregates.operator import Aggregate, Average, Count, Max, Sum
from siltstone.catalog.records.steps import with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.fork import fork
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.operator import ListState, MapState, OpaqueState, Operator, Rows, State, ValueState, WindowState
from siltstone.restore.export import rebuild, unit_tasks
from siltstone.retention.savepoints import set_savepoint
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.sinks.parquet import ParquetSink
from siltstone.store.filesystem import FilesystemStore
from siltstone.stream import Stream
from tests.arrow_strategies import TYPES, random_array
from tests.outbox_run import roll_back
from tests.proofs import in_order
from tests.region_run import RegionRun

GOLDEN = Path(__file__).parent / "golden"
NAME, FORK = "golden", "golden-fork"
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=4, size_ratio_max=None))
COLUMNS = {f"c{i}": kind for i, kind in enumerate(TYPES)}
_TIME = pa.timestamp("us", tz="UTC")
_KEYS, _FEW, _WIDE = 30, 4, 70_000


class Everything(Operator):
    """Every kind of variable, with values of every type."""

    key = {"id": pa.int64(), "name": pa.string()}  # noqa: RUF012
    inputs = ("n", "at", *COLUMNS)
    output = pa.schema([("id", pa.int64()), ("name", pa.string()), ("n", pa.int64())])
    values = ValueState(value=COLUMNS)
    entries = MapState(key={"n": pa.int64()}, value={"at": _TIME})
    items = ListState(value={"n": pa.int64()})
    recent = WindowState(value={"at": _TIME, "n": pa.int64()}, order="at")
    texts = OpaqueState(create=str, serialize=str.encode, deserialize=bytes.decode)
    tallies = OpaqueState(create=dict, serialize=lambda d: json.dumps(d).encode(), deserialize=json.loads)

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Keep the newest row of each key, and each row in the map, the list and the window."""
        state.values.put(rows.keys, {name: rows.last(name) for name in COLUMNS})
        state.entries.put(rows.keys.columns.append_column("n", rows.last("n")).append_column("at", rows.last("at")))
        state.items.append(rows.keys, rows.key_index, rows.table.select(["n"]))
        state.recent.insert(rows.keys, rows.key_index, rows.table.select(["at", "n"]))
        n = int(rows.table.column("n")[0].as_py())
        for group in np.unique(rows.key_groups).tolist():
            state.tallies[group] = {"rows": state.tallies[group].get("rows", 0) + 1}
            if n <= _FEW:
                state.texts[group] = f"{group} {n} " * (_WIDE // 4 if group == 0 else 1)
        return rows.table.select(list(self.output.names))


STREAM = Stream(
    NAME,
    source=lambda spark, _: spark.sql(""),
    operators=[
        Everything(name="everything"),
        Aggregate(
            "sums",
            key={"name": pa.string()},
            aggregates=[Count("rows"), Sum("total", of="n"), Max("most", of="n"), Average("mean", of="n")],
            output=False,
        ),
    ],
    sinks={"everything": ParquetSink()},
    max_parallelism=4,
)


def batch(n: int) -> pa.Table:
    """All keys in the first micro-batch, then a few of them."""
    random, size = Random(n), _KEYS if n == 1 else _FEW
    keys = [(7 * n + i) % _KEYS for i in range(size)]
    values = {name: random_array(random, kind, size) for name, kind in COLUMNS.items()}
    at = pa.array([n * 3_600_000_000] * size, pa.int64()).cast(_TIME)
    return pa.table({"id": keys, "name": [f"key {k % 5}" for k in keys], "n": [n] * size, "at": at, **values})


def write(place: OpenWarehouse) -> None:
    """Run the stream and its life cycle in an empty warehouse."""
    run = RegionRun(place, STREAM, POLICY, parallelism=2, checkpoint_steps=2)
    for n in range(1, 13):
        run.step(batch(n))
    run.region.close("done")
    materialize(place, NAME, "everything", 5, id="golden", parallelism=2, run=in_order)
    roll_back(place, 5, NAME)
    run = RegionRun(place, STREAM, POLICY, parallelism=3, checkpoint_steps=2)
    for step, ends in with_ends(run.region.logged_steps()):
        run.step(batch(step.batch + 1), ends=ends)
    run.step(batch(13))
    run.step_without_rows()
    run.region.close("done")
    newest = place.catalog.checkpoints.get_latest(NAME)
    manifest = read_manifest(place.warehouse.store, newest.manifest)
    parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, manifest, "heap", "golden")]
    objects = [stored for part in parts for stored in part.objects]
    place.catalog.reference_copies.add(NAME, newest.epoch, newest.id, objects, sum(part.rows for part in parts))
    set_savepoint(place.catalog, NAME, "kept", at=str(newest.id - 1))
    fork(place, NAME, FORK, at=str(newest.id))


def rows_of(place: OpenWarehouse, stream: str, checkpoint: int) -> dict[str, list[str]]:
    """operator.variable -> what a restore of a checkpoint gives, each row or value as text, in order."""
    stored = place.catalog.chains.list_manifests(stream, checkpoint)
    manifests = read_manifests(place.warehouse.store, stored, stream)
    found: dict[str, list[str]] = {}
    for task in unit_tasks(manifests, checkpoint, 1, None)[0]:
        state = rebuild(place.warehouse.store, task)
        for name, table in state.tables.items():
            rows = [row for part, _ in table.scan(state.groups) for row in part.to_pylist()]
            found[f"{task.unit.operator}.{name}"] = sorted(map(repr, rows))
        for name, values in state.opaque.items():
            found[f"{task.unit.operator}.{name}"] = sorted(map(repr, values.items()))
    return found


def contents(place: OpenWarehouse, streams: Sequence[str] = (NAME, FORK)) -> dict[str, Any]:
    """What each stream's checkpoints hold: stream -> checkpoint -> its digest and rows."""
    return {
        stream: {
            str(record.id): {"digest": record.digest, "rows": rows_of(place, stream, record.id)}
            for record in place.catalog.checkpoints.list(stream)
        }
        for stream in streams
    }


def unpack(archive: Path, directory: Path) -> dict[str, Any]:
    """Unpack an archive into a directory; return what its warehouse must give."""
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    return json.loads((directory / "expected.json").read_text())


def pack(path: Path, root: Path, expected: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Write an archive of what is in `root` of these parts, and of what its warehouse must give."""
    (root / "expected.json").write_text(json.dumps(expected))
    with tarfile.open(path, "w:xz") as file:
        for part in ("expected.json", *parts):
            if (root / part).exists():
                file.add(root / part, part, filter=_needed)


def _needed(found: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what a machine keeps for itself, and whose the file was."""
    name = Path(found.name).name
    if name in ("work", "LOCK", "LOG") or name.startswith(("LOG.old", "OPTIONS")):
        return None
    found.uid = found.gid = 0
    found.uname = found.gname = ""
    return found


@contextmanager
def opened(archive: Path, directory: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The warehouse of an archive in a directory, as a store keeps it; and what it must give."""
    expected = unpack(archive, directory)
    with patch.object(FilesystemStore, "ranged", expected.pop("ranged")):
        yield directory / "warehouse", expected


def write_archive(path: Path, *, ranged: bool) -> None:
    """Write an archive with one object for all sections of a segment, or one for each."""
    with tempfile.TemporaryDirectory() as directory, patch.object(FilesystemStore, "ranged", ranged):
        root = Path(directory)
        with OpenWarehouse.open_writable(str(root / "warehouse")) as place:
            write(place)
            expected = {"ranged": ranged, **contents(place)}
        pack(path, root, expected, ("warehouse/objects", "warehouse/catalog.db"))
