"""A warehouse of tiny objects of every kind, and all that reads the blocks of a checkpoint, each planned already."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import CorruptObject
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.model import KeyGroupRange
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.restore.compare import compare, compare_tasks
from siltstone.restore.export import rebuild, restore_unit, unit_tasks
from siltstone.restore.proof import plan_checkpoints
from siltstone.restore.restore import digests_of
from siltstone.restore.scan import Selection, TableShape, plan_scan, scan
from siltstone.restore.verify import check_indexes, prove
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.spark.datasource import StateReader, StateSource
from siltstone.stream import Stream
from tests.proofs import in_order
from tests.region_run import RegionRun

NAME = "tiny"
MAX_PARALLELISM = 2
KEYS = 6
LAST = 4
"""checkpoints: a base, a delta, a delta that is materialized, a delta"""


class Tiny(Operator):
    """The newest row of each key, and how many rows each key group had."""

    name = "tiny"
    key = {"k": pa.int64()}  # noqa: RUF012
    row = ValueState(value={"n": pa.int64(), "s": pa.string()})
    counts = OpaqueState(dict, lambda counts: json.dumps(counts).encode(), json.loads)

    def process(self, rows: Rows, state: State) -> None:
        state.row.put(rows.keys, rows.table.select(["n", "s"]))
        for group in np.unique(rows.key_groups):
            state.counts[group] = {"rows": state.counts[group].get("rows", 0) + 1}


def _no_source(*_: Any) -> Any:
    raise AssertionError("no query runs here")


STREAM = Stream(NAME, _no_source, [Tiny()], max_parallelism=MAX_PARALLELISM)


def rows_of(checkpoint: int) -> pa.Table:
    keys = np.arange(KEYS) if checkpoint == 1 else np.arange(2) + checkpoint
    return pa.table({"k": keys, "n": keys * 100 + checkpoint, "s": [f"s{k}" * checkpoint for k in keys]})


@dataclass(frozen=True)
class Stored:
    """A warehouse of tiny objects; the last checkpoint has a snapshot."""

    url: str
    packed: bool
    place: OpenWarehouse
    snapshot: tuple[Any, ...]

    def path(self, name: str) -> Path:
        return self.place.warehouse.local.objects / name

    def manifests(self, checkpoint: int) -> Mapping[int, Any]:
        stored = self.place.catalog.chains.list_manifests(NAME, checkpoint)
        return read_manifests(self.place.warehouse.store, stored, NAME)


@contextmanager
def written(url: str) -> Iterator[Stored]:
    """The stream's four checkpoints at a warehouse's URL."""
    with OpenWarehouse.open_writable(url) as place:
        policy = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
        run = RegionRun(place, STREAM, policy)
        for checkpoint in range(1, LAST + 1):
            run.step(rows_of(checkpoint))
            if checkpoint == LAST - 1:
                materialize(place, NAME, "tiny", checkpoint, id="m", parallelism=1, run=in_order)
        run.region.close("done")
        store = place.warehouse.store
        manifest = read_manifest(store, place.catalog.checkpoints.get(NAME, LAST).manifest)
        parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, manifest, "heap", "test")]
        yield Stored(url, store.ranged, place, tuple(o for part in parts for o in part.objects))


Reader = Callable[[], object]
"""reads something of a checkpoint and answers with what compares equal if the same was read"""


def plain(tables: Iterator[pa.Table]) -> list[dict[str, Any]]:
    return [row for table in tables for row in table.to_pylist()]


def readers(stored: Stored, at: int, out: Path) -> dict[str, Reader]:
    """All that read blocks of a checkpoint, each planned already."""
    place, store, manifests = stored.place, stored.place.warehouse.store, stored.manifests(at)
    [task] = unit_tasks(manifests, at, 1, None)[0]
    [export] = unit_tasks(manifests, at, 1, out)[0]
    proof = plan_checkpoints(place, NAME, [at])
    assert not proof.failures

    def verified() -> object:
        found = [f for t in proof.tasks for f in prove(store, t).failures]
        found += [f for checks in proof.indexes for f in check_indexes(store, checks)]
        if found:
            raise CorruptObject(found[0].reason)
        return None

    def exported() -> object:
        result = restore_unit(store, export)
        return result.rows, [pq.read_table(part).to_pylist() for part in sorted(out.rglob("*.parquet"))]

    def restored() -> object:
        state = rebuild(store, task)
        rows = plain(rows for rows, _ in state.tables["row"].scan(KeyGroupRange(0, MAX_PARALLELISM)))
        return rows, {name: digests.tolist() for name, digests in digests_of(state).items()}, state.opaque

    def scanned(variable: str, **options: str) -> Reader:
        given = {"warehouse": stored.url, "stream": NAME, "operator": "tiny", "variable": variable, "at": str(at)}
        source = StateSource.find(given | options)
        reader = StateReader(source, source.schema)
        partitions = reader.partitions()
        return lambda: [row for p in partitions for batch in reader.read(p) for row in batch.to_pylist()]

    shape = TableShape.of(manifests[at], "tiny", "row")
    [whole] = plan_scan(manifests, shape, Selection(tuple(shape.columns.names)), 1)
    found: dict[str, Reader] = {
        "restore": restored,
        "export": exported,
        "verify": verified,
        "scan": lambda: plain(scan(store, whole)),
        "data source": scanned("row"),
        "data source: columns": scanned("row", columns="s"),
        "data source: keys": scanned("row", keys='[{"k": 4}]'),
        "data source: key groups": scanned("row", key_groups="1", columns="k,n"),
        "data source: opaque": scanned("counts", key_groups="0"),
    }
    if at == LAST:
        [pair] = compare_tasks([task], stored.snapshot)
        found["verify --deep"] = lambda: [(table.same, table.restored_rows.tolist()) for table in compare(store, pair)]
    return found
