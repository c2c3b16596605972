"""More bytes of one string column than Arrow can gather: a checkpoint is restored, whatever its rows weigh."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.format import base
from siltstone.format.manifests import read_manifests
from siltstone.model import KeyGroupRange
from siltstone.restore import compare as comparison
from siltstone.restore import merge
from siltstone.restore.compare import compare, compare_tasks
from siltstone.restore.export import unit_tasks
from siltstone.restore.merge import Changes
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.state.backend import Keys
from siltstone.state.backends.heap import HeapTable, records
from siltstone.state.columns import row_bytes, split_by_bytes, take_from
from siltstone.state.hashing import xxhash64
from siltstone.state.schema import TableSchema
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun

SCHEMA = TableSchema(
    pa.schema([pa.field("k", pa.int64(), nullable=False)]), pa.schema([]), pa.schema([("s", pa.string())])
)
MIB = 1 << 20
KEYS, DELTAS = 44, 50
LONG = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))


@pytest.mark.thorough
def test_changes_of_more_than_2_gib_in_one_column_are_merged(tmp_path: Path) -> None:
    """Really as many: 1 MiB in each of 44 keys, changed by each of 50 deltas; `scratch` keeps memory below 1 GiB."""
    assert KEYS * DELTAS * MIB > 1 << 31
    changes = Changes(SCHEMA, 2, tmp_path)
    owners = np.sort(np.arange(KEYS) % 2).astype(np.uint16)
    for delta in reversed(range(DELTAS)):
        values = pa.array([chr(65 + delta) * MIB] * KEYS)
        columns = [np.arange(KEYS), values, np.arange(KEYS) % 11 == 10]
        changes.add(pa.table(columns, schema=SCHEMA.changes), owners)
    rows, seen = [], []
    for table, groups in changes.merge([], KeyGroupRange(0, 2)):
        assert table.nbytes < 1 << 30
        rows += [
            (key, hashlib.sha256(text.encode()).digest()) for key, text in zip(*table.to_pydict().values(), strict=True)
        ]
        seen += groups.tolist()
    newest = hashlib.sha256((chr(65 + DELTAS - 1) * MIB).encode()).digest()
    assert sorted(rows) == [(key, newest) for key in range(KEYS) if key % 11 != 10]
    assert seen == sorted(seen)


def test_large_rows_that_follow_each_other_are_scanned_and_compacted_in_batches_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "_LARGE_BYTES", 10 * MIB)
    table = HeapTable.in_memory(SCHEMA, 1)
    keys = np.arange(20_000)
    values = pa.array(["x" * (MIB if 5000 <= key < 5040 else 1) for key in keys])
    owners = np.zeros(len(keys), np.uint16)
    batch = Keys(pa.table([keys], schema=SCHEMA.primary_key), xxhash64([pa.array(keys)]), owners)
    table.put(batch, pa.table([values], schema=SCHEMA.value))
    batches = [rows for rows, _ in table.scan(KeyGroupRange(0, 1))]
    assert max(batch.nbytes for batch in batches) < 12 * MIB
    assert pa.concat_tables(batches).equals(pa.table([keys, values], schema=SCHEMA.rows))


def test_rows_are_cut_by_bytes_and_taken_from_several_tables() -> None:
    tables = [pa.table({"s": ["aaaa", None, "b"]}), pa.table({"s": ["cc"]}), pa.table({"s": ["", "dddddd"]})]
    sizes = np.concatenate([row_bytes(table) for table in tables])
    assert sizes.tolist() == [4, 0, 1, 2, 0, 6]
    assert split_by_bytes(sizes, 5) == [slice(0, 3), slice(3, 5), slice(5, 6)]
    assert split_by_bytes(sizes, 0) == [slice(i, i + 1) for i in range(6)]
    whole = pa.concat_tables(tables)
    for rows in ([5, 0, 3, 0, 1], [4], [], [2, 1, 0]):
        assert take_from(tables, np.array(rows, np.int64)).equals(whole.take(pa.array(rows, pa.int64())))


def consolidate(place: OpenWarehouse, operator: str) -> None:
    materialize(place, SMALL.name, operator, 3, id=operator, parallelism=2, run=lambda f, tasks: [f(t) for t in tasks])


@pytest.mark.slow
def test_a_chain_reads_the_same_however_few_bytes_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(merge, "TOGETHER_BYTES"), (merge, "MERGED_BYTES"), (base, "PIECE_BYTES"), (base, "READ_BYTES")]
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, SMALL, LONG, parallelism=2)
        few = [rows.slice(0, 100) for rows in purchases()[:5]]
        for rows in few[:4]:
            run.step(rows)
        for module, limit in [*limits, (comparison, "COMPARED_BYTES"), (records, "_LARGE_BYTES")]:
            monkeypatch.setattr(module, limit, 300)
        before = place.catalog.checkpoints.get(SMALL.name, 4).digest
        assert restored_digest(place, SMALL.name, 4, 3) == before
        for operator in SMALL.operators:
            consolidate(place, operator.name)
        assert restored_digest(place, SMALL.name, 4) == before
        assert not failures(place, SMALL.name)
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(SMALL.name, 4))
        tasks = snapshot_tasks(place.warehouse, manifests[4], "heap", "test")
        snapshot = [stored for task in tasks for stored in take_snapshot(task).objects]
        units, _ = unit_tasks(manifests, 4, 1, None)
        compared = [table for task in compare_tasks(units, snapshot) for table in compare(place.warehouse.store, task)]
        assert compared and all(table.same for table in compared)
        again = RegionRun(place, SMALL, LONG, parallelism=3)
        again.step(few[4])
        assert restored_digest(place, SMALL.name, 5) == place.catalog.checkpoints.get(SMALL.name, 5).digest
