"""Laws of checkpoints as files: whatever happens, each restores, and files go with the last checkpoint that needs them.

Runs with files alternate with runs with bases and deltas. Machines are lost, wholly or but for their files; the stream
is rescaled, rolled back, materialized and killed with pending checkpoints; old checkpoints are deleted.
"""

import shutil
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import policy_by_name
from siltstone.format.manifests import read_manifest
from siltstone.model import Form
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import SweepOptions, sweep
from tests.examples import few_examples
from tests.outbox_run import roll_back
from tests.places import place_at
from tests.proofs import in_order
from tests.property.test_unchanged_laws import POLICY, STREAM, VARIABLES, batch, check
from tests.region_run import RegionRun
from tests.stored import stream_objects
from tests.sums import NAME

pytestmark = pytest.mark.slow

FILES = policy_by_name("files")
RUNS = [(FILES, "rocksdb"), (FILES, "rocksdb"), (POLICY, "rocksdb"), (POLICY, "heap")]
WHATS = ["step"] * 8 + ["again", "lost", "state lost", "killed", "materialize", "delete", "roll back"]


def files_of(place: OpenWarehouse, checkpoint: int) -> set[str]:
    manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get(NAME, checkpoint).manifest)
    return {h.object for h in manifest.handles if h.form is Form.FILES}


def hurt(place: OpenWarehouse, what: str, data: st.DataObject) -> None:
    """What happens between two runs."""
    work = place.warehouse.local.root / "work"
    if what == "lost":
        shutil.rmtree(work, ignore_errors=True)
    if what == "state lost":
        for state in work.glob("*/*/state/*/*/rocksdb"):
            shutil.rmtree(state)
    if what == "roll back":
        roll_back(place, data.draw(st.sampled_from([c.id for c in place.catalog.checkpoints.list(NAME)])), NAME)


@settings(phases=[Phase.explicit, Phase.generate], max_examples=few_examples(20), deadline=None)
@given(st.data())
def test_whatever_happens_each_checkpoint_restores_and_files_go_when_none_needs_them(data: st.DataObject) -> None:
    keys, names = st.lists(st.integers(0, 30), min_size=1, max_size=8), st.sets(st.sampled_from(VARIABLES))
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        place = stack.enter_context(place_at(Path(directory) / "w"))
        run, n = RegionRun(place, STREAM, FILES, parallelism=2, backend="rocksdb"), 1
        run.step(batch(n, range(20), VARIABLES))
        for _ in range(data.draw(st.integers(4, 12))):
            n += 1
            match what := data.draw(st.sampled_from(WHATS)):
                case "step":
                    run.step(batch(n, data.draw(keys), sorted(data.draw(names))))
                    continue
                case "materialize":
                    at = data.draw(st.sampled_from([c.id for c in place.catalog.checkpoints.list(NAME)]))
                    materialize(place, NAME, "mixed", at, id=f"m{n}", parallelism=2, run=in_order)
                    continue
                case "delete":
                    older = [c.id for c in place.catalog.checkpoints.list(NAME)][:-1]
                    delete_checkpoints(place, NAME, older[: data.draw(st.integers(0, len(older)))])
                    continue
                case "killed" if run.region.options.max_pending:
                    pass  # what is pending is given up
                case _:
                    run.complete_pending()
                    hurt(place, what, data)
            policy, backend = data.draw(st.sampled_from(RUNS))
            parallelism, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
            pending = data.draw(st.sampled_from([0, 0, 2]))
            run = RegionRun(place, STREAM, policy, parallelism, steps, backend=backend, max_pending=pending)
        run.complete_pending()
        run.region.close("stopped")
        check(place)
        sweep(place, NAME, SweepOptions(age_guard=timedelta(0)))
        check(place)
        kept = place.catalog.checkpoints.last_id(NAME)
        delete_checkpoints(place, NAME, [c.id for c in place.catalog.checkpoints.list(NAME)][:-1])
        check(place)
        stored = {name for name, _ in stream_objects(place.warehouse.store)}
        assert stored == {each.name for each in place.catalog.objects.list(NAME)}
        needed = {each.name for each in place.catalog.chains.list_objects(NAME, kept)}
        assert {name for name in stored if name.endswith((".sst", ".files"))} <= needed | files_of(place, kept)
