"""What a resuming run reads from the store: nothing where its working state is here, else its own key groups only."""

import shutil

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.format import base
from siltstone.format.manifests import read_manifests
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.restore.export import restore_unit, unit_tasks
from siltstone.run import persist
from siltstone.store import blocks, ranged
from siltstone.store.paths import ALL_EXTRACTS
from siltstone.stream import Stream
from tests.examples import long_form
from tests.fault.small_stream import SMALL, purchases
from tests.region_run import RegionRun
from tests.store_reads import counted_reads

LONG = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None))
"""one base, then deltas"""
GROUPS = 64
ROWS = 200_000


class Numbers(Operator):
    """Keeps numbers that do not compress."""

    name = "numbers"
    key = {"k": pa.int64()}  # noqa: RUF012
    kept = ValueState({"a": pa.int64(), "b": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        state.kept.put(rows.keys, {"a": rows.keys.hashes.view(np.int64), "b": rows.keys.hashes.view(np.int64) >> 7})


NUMBERS = Stream("numbers", lambda spark, options: spark.sql(""), [Numbers()], max_parallelism=GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("died", ["after a checkpoint", "in the middle of an interval"])
def test_where_the_working_state_is_here_only_the_newest_manifest_is_read(place: OpenWarehouse, died: str) -> None:
    """Committed steps that no checkpoint holds are taken back locally, too."""
    first = RegionRun(place, SMALL, LONG, parallelism=3, checkpoint_steps=2)
    batches = iter(purchases())
    for _ in range(4):
        first.step(next(batches))
    if died == "in the middle of an interval":
        first.step(next(batches))
    newest = place.catalog.checkpoints.get_latest(SMALL.name)
    with counted_reads() as reads:
        run = RegionRun(place, SMALL, LONG, parallelism=3, checkpoint_steps=2)
        run.step(purchases()[4])
    read = [name for name, _, _ in reads.calls if not name.startswith(ALL_EXTRACTS)]
    assert read == [newest.manifest.name]
    run.step(purchases()[5])  # its bases replace what older manifests tell of
    with counted_reads() as reads:
        run.step(purchases()[6])
        run.step(purchases()[7])
    assert reads.calls == []


@pytest.mark.slow
def test_a_subtask_whose_working_state_is_gone_reads_and_the_others_do_not(place: OpenWarehouse) -> None:
    first = RegionRun(place, SMALL, LONG, parallelism=2)
    for rows in purchases()[:3]:
        first.step(rows)
    shutil.rmtree(place.warehouse.local.state(SMALL.name, 1, "accounts", 1))
    with counted_reads() as reads:
        RegionRun(place, SMALL, LONG, parallelism=2).step(purchases()[3])
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(SMALL.name, 3), SMALL.name)
    bases = [h.object for m in manifests.values() for h in m.handles if h.object.endswith("parquet")]
    read = {name for name in reads.names if name.endswith("parquet")}
    assert read == {name for name in bases if "/accounts." in name and ".00001." in name} != set()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(8, 2), (3, 5), long_form(2, 8), long_form(1, 16)])
def test_at_another_parallelism_each_task_reads_its_own_key_groups(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """All together read about what a plain restore reads: what is fetched or written together is small beside a task's
    share here, as it is where states are large."""
    monkeypatch.setattr(base, "ROW_GROUP_ROWS", 1 << 11)
    monkeypatch.setattr(ranged, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(ranged, "RANGE_BYTES", 1 << 10)
    monkeypatch.setattr(blocks, "GAP_BYTES", 1 << 8)
    monkeypatch.setattr(persist, "DELTA_ROWS", 1 << 9)
    first = RegionRun(place, NUMBERS, LONG, parallelism=before)
    first.step(pa.table({"k": np.arange(ROWS)}))
    first.step(pa.table({"k": np.arange(0, ROWS, 3)}))
    with counted_reads() as plain:
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests("numbers", 2), "numbers")
        for task in unit_tasks(manifests, 2, before, None)[0]:
            restore_unit(place.warehouse.store, task)
    with counted_reads() as reads:
        run = RegionRun(place, NUMBERS, LONG, parallelism=after)
        completed = run.step(pa.table({"k": np.zeros(0, np.int64)}))
    assert completed is not None and completed.digest == place.catalog.checkpoints.get("numbers", 2).digest
    assert 0 < reads.bytes_of_state <= 1.4 * plain.bytes_of_state
    last = run.region.warehouse.local.state("numbers", 2, "numbers", after - 1)
    assert last.is_dir() and len(list(last.parent.glob("*.lock"))) == after
