"""Every bit of every kind of object, flipped, through every reader: the answer is right, or an error says what is
damaged. Never another answer, another error, or the end of the process.

`make test-thorough` flips all of them; in `make test` each reader sees a fifth, another one than the reader before.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siltstone.catalog.place import Place
from siltstone.errors import CorruptObject, ProofFailed
from siltstone.lifecycle.comparison import compare, compare_tasks
from siltstone.lifecycle.export import rebuild, restore_unit, unit_tasks
from siltstone.lifecycle.materialize import materialize
from siltstone.lifecycle.proof import plan_checkpoints
from siltstone.lifecycle.restore import chain_manifests, digests_of, read_manifest, read_manifests
from siltstone.lifecycle.scan import Selection, TableShape, plan_scan, scan
from siltstone.lifecycle.snapshot import snapshot_tasks, take_snapshot
from siltstone.lifecycle.verify import check_indexes, prove
from siltstone.model import KeyGroupRange
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.policy.adaptive import PolicyOptions, named
from siltstone.spark.datasource import StateReader, StateSource
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import is_base
from siltstone.stream import Stream
from tests.examples import stride
from tests.region_run import RegionRun
from tests.store_reads import counted_reads

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


def _rows(checkpoint: int) -> pa.Table:
    keys = np.arange(KEYS) if checkpoint == 1 else np.arange(2) + checkpoint
    return pa.table({"k": keys, "n": keys * 100 + checkpoint, "s": [f"s{k}" * checkpoint for k in keys]})


@dataclass(frozen=True)
class Stored:
    """A warehouse of tiny objects; the last checkpoint has a snapshot."""

    url: str
    packed: bool
    place: Place
    snapshot: tuple[Any, ...]

    def path(self, name: str) -> Path:
        return self.place.warehouse.local.objects / name

    def manifests(self, checkpoint: int) -> Mapping[int, Any]:
        stored = chain_manifests(self.place.catalog, NAME, checkpoint)
        return read_manifests(self.place.warehouse.store, stored, NAME)


@pytest.fixture(scope="module", params=["packed", "apart"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """`apart`: NON, INCR and INDEX are objects of their own, as in key-value stores."""
    url = str(tmp_path_factory.mktemp("flips") / "w")
    with pytest.MonkeyPatch.context() as patch, Place.writable(url) as place:
        patch.setattr(FilesystemStore, "ranged", request.param == "packed")
        policy = named("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
        run = RegionRun(place, STREAM, policy)
        for checkpoint in range(1, LAST + 1):
            run.step(_rows(checkpoint))
            if checkpoint == LAST - 1:
                materialize(
                    place, NAME, "tiny", checkpoint, id="m", parallelism=1, run=lambda f, ts: [f(t) for t in ts]
                )
        run.region.close("done")
        store = place.warehouse.store
        manifest = read_manifest(store, place.catalog.checkpoint(NAME, LAST).manifest)
        parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, manifest, "heap", "test")]
        yield Stored(url, request.param == "packed", place, tuple(o for part in parts for o in part.objects))


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file, for a while."""
    file = os.open(path, os.O_RDWR)
    try:
        octet = os.pread(file, 1, bit // 8)
        os.pwrite(file, bytes([octet[0] ^ 1 << bit % 8]), bit // 8)
        yield
        os.pwrite(file, octet, bit // 8)
    finally:
        os.close(file)


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


def check_bits(path: Path, reader: Reader, bits: Sequence[int]) -> int:
    """How many flips were noticed; the answer was right with all others."""
    expected, noticed = reader(), 0
    for bit in bits:
        with flipped(path, bit):
            try:
                assert reader() == expected, f"bit {bit}: a wrong answer"
            except (CorruptObject, ProofFailed) as error:
                assert path.name in str(error), error
                noticed += 1
    assert reader() == expected
    return noticed


EVERY_BIT = (1, "data source: columns")
"""the checkpoint and the reader that see every bit, of a base that is read in parts; each of the others sees each byte
with one bit flipped, among them every bit"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, LAST])
def test_every_bit_of_what_a_checkpoint_reads(stored: Stored, at: int, tmp_path: Path) -> None:
    objects = {h.object for m in stored.manifests(at).values() for h in m.handles}
    if stored.packed:
        objects |= {o.name for o in stored.snapshot if at == LAST}
    else:  # bases and snapshots are the same, packed or not
        objects = {name for name in objects if not is_base(name)}
    noticed_by: dict[str, int] = {}
    for nth, (what, reader) in enumerate(readers(stored, at, tmp_path / "out").items()):
        with counted_reads() as reads:
            reader()
        for name in sorted(objects & reads.names):
            path = stored.path(name)
            size = path.stat().st_size
            seen = range(nth % stride(), size, stride())
            every = range(size * 8) if (at, what) == EVERY_BIT else [8 * i + (i + nth) % 8 for i in seen]
            noticed = check_bits(path, reader, every)
            noticed_by[name] = noticed_by.get(name, 0) + noticed
            if is_base(name):
                assert noticed == len(every), f"{what} reads all of {name}"
    assert noticed_by and all(noticed_by.values()), noticed_by


@pytest.mark.slow
def test_every_bit_of_a_manifest(stored: Stored) -> None:
    place, store = stored.place, stored.place.warehouse.store
    for nth, manifest in enumerate(chain_manifests(place.catalog, NAME, LAST)):

        def read(manifest: Any = manifest) -> object:
            read_manifest(store, manifest)
            return None

        path = stored.path(manifest.name)
        bits = range(nth % stride(), path.stat().st_size * 8, stride())
        assert check_bits(path, read, bits) == len(bits)
