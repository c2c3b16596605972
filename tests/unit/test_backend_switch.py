"""A stream goes on with another state backend than the run before it: the other's files are replaced by a restore."""

from pathlib import Path

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError
from siltstone.format.manifests import read_manifest
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.state.backends.named import BACKENDS, backend
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.state_model import ALL, MAX_PARALLELISM, contents
from tests.state_tables import LONG, put
from tests.sums import NAME, POLICY, Counted, stream_of

STREAM = stream_of(Counted())
KEYS = 40


def rows(step: int) -> pa.Table:
    return pa.table({"k": [(step * key) % KEYS for key in range(1, 8)], "n": [step] * 7})


def digests(root: Path, runs: list[str]) -> list[str]:
    """Run three checkpoints of two steps with each backend in turn; the digests of all checkpoints."""
    with OpenWarehouse.open_writable(str(root)) as place:
        found, step = [], 0
        for kind in runs:
            run = RegionRun(place, STREAM, POLICY, parallelism=2, checkpoint_steps=2, backend=kind)
            for _ in range(6):
                step += 1
                completed = run.step(rows(step))
                if completed:
                    found.append(completed.digest)
            run.region.close("stopped")
        assert not failures(place, NAME)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("runs", [["heap", "rocksdb", "heap"], ["rocksdb", "heap", "rocksdb"], ["rocksdb"] * 3])
def test_each_run_may_have_another_backend(tmp_path: Path, runs: list[str]):
    assert digests(tmp_path / "switched", runs) == digests(tmp_path / "heap", ["heap"] * 3)


@pytest.mark.parametrize("first", BACKENDS)
def test_state_of_another_backend_is_not_trusted(tmp_path: Path, first: str):
    """Not even if it is empty, and the files of the first are left as they are."""
    state = backend(first).open(tmp_path, {"t": LONG}, (), ALL, MAX_PARALLELISM)
    state.begin(1, tracking=True)
    put(state, k1=1)
    state.commit()
    before = contents(state.tables["t"])
    state.close()
    for other in BACKENDS:
        if other != first:
            with pytest.raises(StateError, match="delete this working state and restore it"):
                backend(other).open(tmp_path, {"t": LONG}, (), ALL, MAX_PARALLELISM)
    state = backend(first).open(tmp_path, {"t": LONG}, (), ALL, MAX_PARALLELISM)
    assert (state.version, contents(state.tables["t"])) == (1, before)
    state.close()


def test_a_full_snapshot_of_state_in_rocksdb(tmp_path: Path):
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        run = RegionRun(place, STREAM, POLICY, parallelism=2, backend="rocksdb")
        completed = run.step(rows(1))
        assert completed is not None
        manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get_latest(NAME).manifest)
        tasks = snapshot_tasks(place.warehouse, manifest, "rocksdb", "a")
        assert sum(take_snapshot(task).rows for task in tasks) == completed.state_rows
